"""Optimizers and the learning rate's schedule.

Muon (K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) replaces the momentum of each
weight matrix by the nearest orthogonal matrix, so that every direction of a matrix moves alike. torch has
`torch.optim.Muon`, for matrices only; here convolutions count as matrices of (out, in * height * width), matrices of
one shape are treated in one batched product, and AdamW takes the rest within the same optimizer: one step, one state.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from math import cos, pi
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from unet_attn.sharding import sharded_like, whole

Schedule = Literal["constant", "cosine"]

# The quintic of Jordan's post: its slope at 0 is as steep as it can be while singular values end between 0.7 and 1.2.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.99)  # 0.99 rather than 0.999: runs of some hundred steps never fill the longer average
ADAM_EPS = 1e-8
# The share of a run after which the warm-up is over however many steps it was meant to have.
LONGEST_WARMUP = 0.1


def learning_rate_factor(
    step: int, progress: float, *, warmup_steps: int, schedule: Schedule, cooldown_fraction: float
) -> float:
    """What the learning rate is multiplied by in optimizer step `step` (from 1): warm-up, then as `schedule` says.

    progress: the part of the run that lies behind when the step begins, in [0, 1], by steps or by the clock. The
    warm-up lasts `warmup_steps`, or a tenth of a run that is too short for that. "constant" cools down linearly over
    the last `cooldown_fraction` of the run, "cosine" (Loshchilov & Hutter 2017, eq. 5, one period) over all of it; both
    would reach 0 in the step after the last.
    """
    warm = max(step / warmup_steps if warmup_steps else 1.0, progress / LONGEST_WARMUP)
    if schedule == "cosine":
        cool = (1 + cos(pi * progress)) / 2
    else:
        cool = (1 - progress) / cooldown_fraction if cooldown_fraction else 1.0
    return max(0.0, min(1.0, warm, cool))


def newton_schulz(matrices: Tensor) -> Tensor:
    """Orthogonalize a batch of matrices approximately.

    matrices: (B, M, N). Returns (B, M, N), each near U V^T where the matrix is U S V^T.
    """
    a, b, c = NEWTON_SCHULZ
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)

    # Each step is X <- p(X X^T) X with p(G) = a + b G + c G^2. All of these commute, so the steps are taken on the
    # small square side, G <- p(G) G p(G), and X is multiplied once by the product of the p: 2.5 times faster at
    # 128 x 1152, a quarter slower where the matrix is square. Nearly singular input costs 2e-4 of accuracy.
    gram = x @ x.mT
    product = None
    for step in range(NEWTON_SCHULZ_STEPS):
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        product = polynomial if product is None else polynomial @ product
        if step < NEWTON_SCHULZ_STEPS - 1:
            gram = polynomial @ gram @ polynomial
    x = product @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Muon for `matrices` and AdamW for `others`, as two parameter groups of one optimizer.

    matrices: parameters of two or more dimensions, seen as (first, product of the rest); others: everything else.
    lr, adam_lr: their learning rates. There is no weight decay. The update's scale
    is sqrt(max(1, rows / columns)), as in Jordan's post.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        *,
        lr: float,
        adam_lr: float,
    ) -> None:
        groups = [
            {"params": list(matrices), "lr": lr, "orthogonal": True},
            {"params": list(others), "lr": adam_lr, "orthogonal": False},
        ]
        for parameter in groups[0]["params"]:
            if parameter.ndim < 2:
                raise ValueError(f"Muon takes parameters of two or more dimensions, got shape {tuple(parameter.shape)}")
        super().__init__([group for group in groups if group["params"]], defaults={})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["orthogonal"]:
                self._step_matrices(parameters, group["lr"])
            elif parameters:
                self._step_others(parameters, group["lr"])
        return loss

    def _step_matrices(self, parameters: list[nn.Parameter], lr: float) -> None:
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape[0], parameter.numel() // parameter.shape[0]].append(parameter)
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

        for (rows, columns), alike in by_shape.items():
            gradients = [parameter.grad for parameter in alike]
            momenta = [self.state[parameter]["momentum_buffer"] for parameter in alike]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            nesterov = torch._foreach_lerp(gradients, momenta, MOMENTUM)
            # a sharded matrix is put together for this, and every process keeps its slice of the outcome
            updates = newton_schulz(torch.stack([whole(update).reshape(rows, columns) for update in nesterov]))
            scale = lr * max(1.0, rows / columns) ** 0.5
            for parameter, update in zip(alike, updates, strict=True):
                parameter.add_(sharded_like(update.reshape(parameter.shape), parameter), alpha=-scale)

    def _step_others(self, parameters: list[nn.Parameter], lr: float) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            amsgrad=False,
            beta1=ADAM_BETAS[0],
            beta2=ADAM_BETAS[1],
            lr=lr,
            weight_decay=0.0,
            eps=ADAM_EPS,
            maximize=False,
        )


def hidden_matrices(model: nn.Module, *, ends: Iterable[nn.Module] = ()) -> set[str]:
    """The names of the weights that Muon suits: of linear layers and convolutions, but not of the modules in `ends`.

    Embeddings are looked up rather than multiplied, and the first and last layers meet pixels rather than features; all
    of these are left to AdamW, as Jordan's post advises.
    """
    outer = {id(module) for end in ends for module in end.modules()}
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d)
    return {
        f"{name}.weight".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, layers) and id(module) not in outer and module.weight.requires_grad
    }


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    name: str,
    *,
    learning_rate: float,
    muon_learning_rate: float,
    matrices: Collection[str],
) -> torch.optim.Optimizer:
    """The optimizer `name` ("adamw" or "muon") for the parameters, given by their names in the model.

    learning_rate: AdamW's, in both; muon_learning_rate: Muon's, for those named in `matrices` (see `hidden_matrices`).
    """
    if name == "adamw":
        optimizer = torch.optim.AdamW(
            parameters.values(), lr=learning_rate, betas=ADAM_BETAS, eps=ADAM_EPS, weight_decay=0.0, fused=True
        )
    elif name == "muon":
        optimizer = Muon(
            [parameter for key, parameter in parameters.items() if key in matrices],
            [parameter for key, parameter in parameters.items() if key not in matrices],
            lr=muon_learning_rate,
            adam_lr=learning_rate,
        )
    else:
        raise ValueError(f"the optimizer must be adamw or muon, got {name!r}")
    for group in optimizer.param_groups:
        group["full_lr"] = group["lr"]
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to `factor` times the one it was built with."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group["full_lr"]


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state as tensors named `<parameter> <key>`, whatever the order of its groups."""
    return {
        f"{name} {key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Put tensors from `optimizer_tensors` back into an optimizer that has not stepped yet."""
    states: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, value in tensors.items():
        name, _, entry = key.rpartition(" ")
        # in the parameter's memory layout and slices, as the optimizer would have made it
        like = value.ndim > 0 and name in parameters
        states[name][entry] = _copy_like(value, parameters[name]) if like else value
    names = {id(parameter): name for name, parameter in parameters.items()}
    # torch numbers the parameters through the groups in order
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    described = optimizer.state_dict()
    described["state"] = {number: states[name] for number, name in enumerate(order) if name in states}
    optimizer.load_state_dict(described)


def _copy_like(value: Tensor, parameter: Tensor) -> Tensor:
    return torch.empty_like(parameter, requires_grad=False).copy_(sharded_like(value, parameter))

"""Does the model use its captions? Its loss with true, exchanged and empty captions, at fixed noise and times.

Letters: N pictures, T times. The same pictures, noise and times under each kind of caption make the differences
paired, so that they are far more exact than the losses themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unet_attn.measures import Estimate, mean_with_error
from unet_attn.objective import Objective
from unet_attn.pipelines.inputs import evaluation_mode
from unet_attn.pipelines.text_to_image import TextToImagePipeline, encode_captions
from unet_attn.sampler import batch_noise, sample_generator

TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)  # 0 = clean, 1 = noise
EXCHANGE = 100  # the purpose of the one draw here, away from those of `sampler`
NOISE_STEP = 0  # training counts its steps from 1


@dataclass(frozen=True)
class ConditioningGap:
    """Unweighted mean square errors of the prediction; a gap is how much the error rises without the true caption.

    true, exchanged, empty: over all pictures and times; gap_exchanged, gap_empty: paired differences to `true`;
    by_time: per kind of caption the mean at each of `times`. A model without text has `empty` alone; where all captions
    say the same none can be exchanged, and `exchanged` and its gap are None.
    """

    empty: Estimate
    true: Estimate | None
    exchanged: Estimate | None
    gap_exchanged: Estimate | None
    gap_empty: Estimate | None
    times: tuple[float, ...]
    by_time: dict[str, list[float]]
    pictures: int


def conditioning_gap(
    pipeline: TextToImagePipeline, pictures: Tensor, captions: Sequence[str], *, seed: int = 0, batch_size: int = 64
) -> ConditioningGap:
    """The losses of a model on pictures (N, C, H, W) in [-1, 1] with their N captions; see ConditioningGap.

    Where all captions are the same none can be exchanged, and the figures of that kind are None.
    """
    kinds = {"empty": [""] * len(pictures)}
    if pipeline.text_encoder is not None:
        kinds = {"true": list(captions)} | kinds
        if len(set(captions)) > 1:
            kinds = {"true": list(captions), "exchanged": exchanged_captions(captions, seed=seed)} | kinds
    losses = {
        kind: validation_losses(pipeline, pictures, texts, seed=seed, batch_size=batch_size)
        for kind, texts in kinds.items()
    }

    means = {kind: loss.mean(dim=0) for kind, loss in losses.items()}
    gaps = {kind: means[kind] - means["true"] for kind in means if kind != "true" and "true" in means}
    estimates = {kind: mean_with_error(values, seed=seed) for kind, values in means.items()}
    gap_estimates = {kind: mean_with_error(values, seed=seed) for kind, values in gaps.items()}
    return ConditioningGap(
        empty=estimates["empty"],
        true=estimates.get("true"),
        exchanged=estimates.get("exchanged"),
        gap_exchanged=gap_estimates.get("exchanged"),
        gap_empty=gap_estimates.get("empty"),
        times=TIMES,
        by_time={kind: loss.mean(dim=1).tolist() for kind, loss in losses.items()},
        pictures=len(pictures),
    )


@torch.inference_mode()
def validation_losses(
    pipeline: TextToImagePipeline, pictures: Tensor, captions: Sequence[str], *, seed: int = 0, batch_size: int = 64
) -> Tensor:
    """The error of every picture at each of TIMES, (T, N) float32 on the CPU, without the loss weights of training.

    pictures: (N, C, H, W) in [-1, 1]; picture n has the noise of (seed, n) at all times, whatever the batch.
    """
    kind = pipeline.config.prediction_type
    objective = Objective(pipeline.scheduler, prediction_type=kind, time_sampling="uniform")
    times = objective.sample_times(torch.tensor(TIMES))
    device, dtype = pipeline.unet.device, pipeline.unet.dtype

    losses = []
    with evaluation_mode(pipeline.unet, pipeline.text_encoder):
        for first in range(0, len(pictures), batch_size):
            clean = pictures[first : first + batch_size].to(device)
            noise = batch_noise(seed, NOISE_STEP, range(first, first + len(clean)), clean.shape[1:]).to(device)
            text, mask = None, None
            if pipeline.text_encoder is not None:
                batch = list(captions[first : first + batch_size])
                text, mask = encode_captions(batch, pipeline.tokenizer, pipeline.text_encoder)
                text = text.to(dtype)
            at_times = []
            for time in times:
                t = time.to(device).expand(len(clean))
                noisy = objective.add_noise(clean, noise, t).to(dtype)
                prediction = pipeline.unet(noisy, objective.model_timestep(t), text, mask).sample
                at_times.append(objective.loss(prediction, clean, noise, t).cpu())
            losses.append(torch.stack(at_times))
    return torch.cat(losses, dim=1)


def exchanged_captions(captions: Sequence[str], *, seed: int = 0) -> list[str]:
    """For each picture the caption of another, drawn at random among those that say something else.

    Raises ValueError if all captions are the same.
    """
    if len(set(captions)) < 2:
        raise ValueError("the conditioning gap needs captions that differ: all of them are the same")
    generator = sample_generator(seed, EXCHANGE)
    drawn = []
    for own in captions:
        other = own
        while other == own:
            other = captions[int(torch.randint(len(captions), (), generator=generator))]
        drawn.append(other)
    return drawn

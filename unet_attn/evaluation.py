"""How far sampled pictures are from real ones: KID, Frechet distance, precision and recall, in a network's features.

Both sides go the same way: 8-bit pictures, then one of the networks of `extractors`, which has the one resize. The
figures compare runs with each other, measured with the same number of pictures.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from unet_attn.data import to_tensor
from unet_attn.measures import gaussian_distance, kernel_distance, precision_and_recall
from unet_attn.pipelines.guidance import PLAIN_GUIDANCE, Guidance
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.sampler import epoch_order

MOST_REAL = 5000  # pictures to compare with: their part of the errors is then small beside that of the sampled ones
MIN_PICTURES = 64  # of each side; below it the error of both figures is larger than what they measure


class _Identity(nn.Identity):
    """Tells torchmetrics, which wants a network, that it is given features already."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features


@dataclass(frozen=True)
class Distances:
    """The figures and what they were computed from. For kid and frechet lower is closer, for the others higher.

    The errors are standard errors; how they are found is said in `measures`.
    """

    kid: float
    kid_error: float
    frechet: float
    frechet_error: float
    precision: float
    precision_error: float
    recall: float
    recall_error: float
    real_pictures: int
    sampled_pictures: int


def choose_pictures(size: int, count: int, seed: int) -> list[int]:
    """`count` indices into a data set of `size`, in an order that `seed` draws; beyond its end it begins again.

    With fewer or more of them the order is the same, so that the first are also the first of a larger choice.
    """
    order = epoch_order(seed, 0, size)
    return [order[n % size] for n in range(count)]


def sample_pictures(
    pipeline: TextToImagePipeline,
    captions: list[str],
    *,
    seed: int,
    num_inference_steps: int,
    guidance_scale: float,
    guidance: Guidance = PLAIN_GUIDANCE,
    batch_size: int = 64,
) -> Iterator[Tensor]:
    """One picture (C, H, W) per caption, rounded to 8 bits and in [-1, 1] again, as it would come from its file.

    Picture n starts from the noise of seed + n, so it is the same in batches of any size. A model without text takes
    from `captions` only their number.
    """
    for first in range(0, len(captions), batch_size):
        batch = captions[first : first + batch_size]
        unconditional = pipeline.text_encoder is None
        pictures = pipeline(
            None if unconditional else batch,
            num_images_per_prompt=len(batch) if unconditional else 1,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            guidance=guidance,
            generator=[torch.Generator().manual_seed(seed + first + n) for n in range(len(batch))],
        ).images
        yield from (to_tensor(picture) for picture in pictures)


def frechet_distance(real: Tensor, sampled: Tensor) -> float:
    """Distance of the Gaussians fitted to two sets of features (N, F): Heusel et al. 2017, eq. 6.

    It falls with the number of pictures, so compare only values of equal counts.
    """
    metric = FrechetInceptionDistance(feature=_Identity(real.shape[1]))
    metric.update(real.double(), real=True)
    metric.update(sampled.double(), real=False)
    return metric.compute().item()


def check_counts(*, real: int | None = None, sampled: int | None = None) -> None:
    """Raise ValueError if a side has too few pictures for the figures to mean anything; None = not known yet."""
    for side, count in (("real", real), ("sampled", sampled)):
        if count is not None and count < MIN_PICTURES:
            raise ValueError(f"{count} {side} pictures are too few to measure a distance: {MIN_PICTURES} are needed")


def compare_features(real: Tensor, sampled: Tensor, *, made_for: Tensor | None = None) -> Distances:
    """All figures of features (N, F) and (M, F), at least 64 of each.

    made_for: (M,), the row of `real` whose caption each sampled picture was made for, or a number from N on for that of
    a picture which is not among them; None = made without captions. See `measures`. Precision and recall are of equal
    counts: of the larger side they take only the first.
    """
    check_counts(real=len(real), sampled=len(sampled))
    kid = kernel_distance(real, sampled, made_for=made_for)
    count = min(len(real), len(sampled))
    made_for_some = None if made_for is None else made_for[:count]
    precision, recall = precision_and_recall(real[:count], sampled[:count], made_for=made_for_some)
    return Distances(
        kid=kid.value,
        kid_error=kid.error,
        frechet=frechet_distance(real, sampled),
        frechet_error=gaussian_distance(real, sampled, made_for=made_for).error,
        precision=precision.value,
        precision_error=precision.error,
        recall=recall.value,
        recall_error=recall.error,
        real_pictures=len(real),
        sampled_pictures=len(sampled),
    )

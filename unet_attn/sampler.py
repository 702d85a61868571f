"""Which picture comes when, and every random draw of training, as pure functions of the seed.

Nothing here keeps a state that would have to be saved: the order of an epoch follows from (seed, epoch), a random draw
from (seed, purpose, step, position in the global batch). So a run does not depend on how many processes or
micro-batches share a batch, and a resumed run goes on exactly where the first one stopped.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# The first key after the seed says what a draw is for, so that no two uses share a stream. The numbers are part of what
# makes a run repeatable: never renumber them.
ORDER = 0
NOISE = 1
TIME = 2
CAPTION = 3
AUGMENT = 4
DROPOUT = 5
MODULE_DROPOUT = 6


def derived_seed(seed: int, *keys: int) -> int:
    """A 64-bit seed from a seed and the keys that say what it is for, the same on every machine and Python.

    torch's CPU generator uses the lower 32 bits of it: over millions of draws two may coincide, which is harmless
    between unrelated samples, while nearby keys never give related streams, as seed + step would.
    """
    digest = hashlib.blake2b(struct.pack(f"<{1 + len(keys)}q", seed, *keys), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def sample_generator(seed: int, *keys: int) -> torch.Generator:
    """A new CPU generator for the draws that `keys` name, for example `(seed, NOISE, step, position)`."""
    return torch.Generator().manual_seed(derived_seed(seed, *keys))


def epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    """The order in which epoch number `epoch`, counted from 0, visits a data set of `size` pictures."""
    return torch.randperm(size, generator=sample_generator(seed, ORDER, epoch)).tolist()


def batch_noise(seed: int, step: int, positions: Iterable[int], shape: Sequence[int]) -> Tensor:
    """Normal noise for the samples at `positions` of a step, each from its own generator. Returns (B, *shape)."""
    return torch.stack([torch.randn(shape, generator=sample_generator(seed, NOISE, step, at)) for at in positions])


def stratified_uniform(seed: int, step: int, batch_size: int) -> Tensor:
    """Numbers in [0, 1) for a step's global batch, one in each interval of 1 / batch_size. Returns (batch_size,).

    So every batch covers all times, which makes the loss less noisy than independent draws (Kingma et al. 2021,
    "Variational Diffusion Models", appendix I.1); a permutation decides which sample takes which interval.
    """
    generator = sample_generator(seed, TIME, step)
    interval = torch.randperm(batch_size, generator=generator)
    within = torch.rand(batch_size, generator=generator, dtype=torch.float64)
    largest = 1.0 - 2.0**-24  # of float32 below 1: rounding must not give 1
    return ((interval + within) / batch_size).float().clamp(max=largest)


def held_out(names: Sequence[str], share: float) -> list[bool]:
    """Which of the pictures are held out: about `share` of them, each by its own name alone, its path within the data.

    So pictures that are added later, or another seed, do not move a picture from one side to the other.
    """

    def part(name: str) -> float:
        return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()) / 2**64

    return [part(name) < share for name in names]


def micro_batch_size(batch_size: int, *, world_size: int, accumulation: int) -> int:
    """How many samples of a global batch a process takes at once. Raises ValueError if they do not split evenly."""
    parts = world_size * accumulation
    if batch_size < 1 or batch_size % parts:
        raise ValueError(
            f"batch size {batch_size} cannot be split evenly over {world_size} process(es) x {accumulation} "
            f"accumulation step(s): it must be a multiple of {parts}"
        )
    return batch_size // parts


class SampleKey(NamedTuple):
    """One place in training: picture `index` at `position` in the global batch of optimizer step `step` (from 1)."""

    index: int
    step: int
    position: int


class GlobalBatchSampler:
    """Lay an endless shuffled stream of pictures out over steps, processes and micro-batches.

    The stream is epoch after epoch; step s takes its samples (s - 1) * batch_size to s * batch_size, so the tail of an
    epoch is filled from the next one and no picture is dropped. With `buckets`, the bucket number of each picture
    (None: held out, never drawn), all pictures of a step are of one bucket: each bucket is such a stream of its own,
    and an epoch holds the steps of all in random order. Iterating gives one list of keys per micro-batch of process
    `rank`, for ever. Resuming is `start_step`, the first step to come.

    Give it to a DataLoader as `batch_sampler`; nothing else (Accelerate above all) may shard it again.
    Raises ValueError if `size` is 0 or `batch_size` does not split evenly over processes and micro-batches.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int,
        *,
        buckets: Sequence[int | None] | None = None,
        start_step: int = 1,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
    ) -> None:
        if buckets is not None and len(buckets) != size:
            raise ValueError(f"there are {len(buckets)} bucket numbers for {size} pictures")
        self.micro_batch_size = micro_batch_size(batch_size, world_size=world_size, accumulation=accumulation)
        self.members: dict[int, list[int]] = {}
        for index, bucket in enumerate(buckets or [0] * size):
            if bucket is not None:
                self.members.setdefault(bucket, []).append(index)
        if not self.members:
            raise ValueError("the data set is empty: there is nothing to order")
        # memos of what was drawn last, on which nothing depends but speed
        self._orders: dict[int, dict[int, list[int]]] = {}
        self._planned: tuple[int, list[int]] = (-1, [])
        self.size = sum(map(len, self.members.values()))
        self.batch_size = batch_size
        self.seed = seed
        self.start_step = start_step
        self.rank = rank
        self.world_size = world_size
        self.accumulation = accumulation

    def __iter__(self) -> Iterator[list[SampleKey]]:
        step = self.start_step
        while True:
            indices = self.indices(step)
            for micro in range(self.accumulation):
                yield [SampleKey(indices[position], step, position) for position in self.positions(micro)]
            step += 1

    def positions(self, micro: int) -> range:
        """The places in the global batch that this process takes in micro-batch number `micro`."""
        start = (micro * self.world_size + self.rank) * self.micro_batch_size
        return range(start, start + self.micro_batch_size)

    def indices(self, step: int) -> list[int]:
        """The pictures of a step's global batch, in the order of their positions."""
        bucket, number = self._place(step)
        members = self.members[bucket]
        first = number * self.batch_size
        places = [divmod(sample, len(members)) for sample in range(first, first + self.batch_size)]
        known = self._orders.get(bucket, {})
        orders = {epoch: known.get(epoch) or self._order(bucket, epoch) for epoch in {epoch for epoch, _ in places}}
        self._orders[bucket] = orders
        return [members[orders[epoch][place]] for epoch, place in places]

    def _place(self, step: int) -> tuple[int, int]:
        """Which bucket a step takes, and the number of this batch in the bucket's stream, from 0."""
        epoch = (step - 1) * self.batch_size // self.size
        while self._steps_before(epoch) > step - 1:  # batches that reach into the next epoch came early
            epoch -= 1
        plan, place = self._plan(epoch), step - 1 - self._steps_before(epoch)
        return plan[place], self._batches_before(plan[place], epoch) + plan[:place].count(plan[place])

    def _batches_before(self, bucket: int, epoch: int) -> int:
        """After so many batches every picture of the bucket has been seen at least `epoch` times."""
        return -(-epoch * len(self.members[bucket]) // self.batch_size)

    def _steps_before(self, epoch: int) -> int:
        return sum(self._batches_before(bucket, epoch) for bucket in self.members)

    def _plan(self, epoch: int) -> list[int]:
        """The buckets of the steps of an epoch."""
        if len(self.members) == 1:
            return [*self.members] * (self._steps_before(epoch + 1) - self._steps_before(epoch))
        if self._planned[0] != epoch:
            steps = [
                bucket
                for bucket in sorted(self.members)
                for _ in range(self._batches_before(bucket, epoch + 1) - self._batches_before(bucket, epoch))
            ]
            shuffled = torch.randperm(len(steps), generator=sample_generator(self.seed, ORDER, epoch, 0))
            self._planned = epoch, [steps[place] for place in shuffled.tolist()]
        return self._planned[1]

    def _order(self, bucket: int, epoch: int) -> list[int]:
        """The order of a bucket's pictures in an epoch of their own."""
        if len(self.members) == 1:
            return epoch_order(self.seed, epoch, self.size)
        generator = sample_generator(self.seed, ORDER, epoch, 1, bucket)
        return torch.randperm(len(self.members[bucket]), generator=generator).tolist()

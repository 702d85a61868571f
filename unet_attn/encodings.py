"""What a frozen text model says of a caption never changes: it is asked once for each, and remembered."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

MEMORY_LIMIT = 1 << 30  # bytes of encodings that are kept; captions beyond are encoded each time

Encode = Callable[[list[str]], tuple[Tensor, Tensor]]  # B captions -> (B, N, D), mask (B, N) bool


class RememberedEncodings:
    """Encodes captions with a frozen model, each caption once; several captions of a picture are several entries.

    Every caption is encoded by itself. So its encoding does not depend, in the last bits, on what it shares a batch
    with, and a resumed run sees exactly the numbers that an uninterrupted one sees.
    """

    def __init__(self, encode: Encode) -> None:
        self.encode = encode
        self.known: dict[str, Tensor] = {}  # caption -> (N, D), without padding, where the model put it
        self.bytes = 0

    @torch.no_grad()
    def __call__(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """captions: B strings. Returns vectors (B, N, D), 0 where padded, and their mask (B, N) bool."""
        each = [self._one(caption) for caption in captions]
        states = pad_sequence(each, batch_first=True)
        lengths = torch.tensor([len(tokens) for tokens in each], device=states.device)
        return states, torch.arange(states.shape[1], device=states.device) < lengths[:, None]

    def _one(self, caption: str) -> Tensor:
        if caption in self.known:
            return self.known[caption]
        states, mask = self.encode([caption])
        tokens = states[0][mask[0]].clone()
        if self.bytes + tokens.nbytes <= MEMORY_LIMIT:
            self.known[caption] = tokens
            self.bytes += tokens.nbytes
        return tokens

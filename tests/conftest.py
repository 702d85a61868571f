"""What every test shares: no network, no user's caches, one thread."""

import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

# before torch, transformers and diffusers are imported; processes that a test starts inherit all of it
_cache = tempfile.TemporaryDirectory(prefix="unet-attn-test-cache-")
os.environ["HF_HOME"] = os.path.join(_cache.name, "huggingface")
os.environ["XDG_CACHE_HOME"] = _cache.name
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # tiny tensors: a second thread costs more than it brings
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the values asserted are the CPU's; set it to test on a GPU


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script's module by name; its imports are paid for once."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "scripts"))
    return import_module

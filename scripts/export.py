"""Export a trained run for programs without torch.

    python scripts/export.py RUN --onnx [--out DIR]        # DIR: RUN/onnx
    python RUN/onnx/sample.py --prompt "a heart"           # numpy, onnxruntime, pillow, tokenizers

The folder holds unet.onnx and text_encoder.onnx, for any batch, size and caption length, the tokenizer, the noise
schedule in settings.json, and a small sampler to begin from. Both networks are compared with torch first.
"""

import argparse
import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from _folder import fresh_folder

OPSET = 20
SCHEDULERS = ("FlowMatchEulerDiscreteScheduler", "DDIMScheduler", "DDPMScheduler")  # whose schedule the sampler follows
TOLERANCE = 1e-4  # between torch and onnxruntime, relative to the largest number of the output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder, or any saved pipeline")
    parser.add_argument("--onnx", action="store_true", required=True, help="the format; there is no other yet")
    parser.add_argument("--out", type=Path, help="a new folder (RUN/onnx)")
    options = parser.parse_args()
    try:
        export(options.run, options.out or options.run / "onnx")
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed: pip install onnx onnxscript onnxruntime", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def export(run: Path, out: Path) -> None:
    """Write the folder, complete or not at all."""
    with fresh_folder(out) as folder:
        import onnx  # noqa: F401  torch asks for both only after seconds
        import onnxscript  # noqa: F401

        from unet_attn.pipelines.text_to_image import TextToImagePipeline

        pipeline = TextToImagePipeline.from_pretrained(run)
        settings = settings_of(pipeline)
        export_unet(pipeline.unet.eval(), folder / "unet.onnx")
        if pipeline.text_encoder is not None:
            export_text_encoder(
                pipeline.text_encoder.eval(), settings["text"]["max_length"], folder / "text_encoder.onnx"
            )
            pipeline.tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "settings.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        shutil.copy(Path(__file__).with_name("_numpy_sampler.py"), folder / "sample.py")
    print(f"written to {out}; both networks agree with torch. Try: python {out / 'sample.py'} --help")


def export_unet(unet: "AttnUNet2D", path: Path) -> None:  # noqa: F821  torch is imported late
    """The U-Net as a function of sample, timestep and, with text, encoder_hidden_states and encoder_attention_mask."""
    import torch
    from torch import Tensor, nn
    from torch.export import Dim

    class Unconditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = unet

        def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
            return self.unet(sample, timestep, return_dict=False)[0]

    class Conditional(Unconditional):
        def forward(
            self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, encoder_attention_mask: Tensor
        ) -> Tensor:
            return self.unet(sample, timestep, encoder_hidden_states, encoder_attention_mask, return_dict=False)[0]

    context_dim, factor = unet.config.context_dim, unet.downsample_factor
    batch, tokens = Dim("batch"), Dim("tokens")
    sides = {2: factor * Dim("rows", min=2), 3: factor * Dim("columns", min=2)}
    axes = {"sample": {0: batch, **sides}, "timestep": {0: batch}}
    if context_dim is not None:
        axes |= {name: {0: batch, 1: tokens} for name in ("encoder_hidden_states", "encoder_attention_mask")}

    def inputs(batch: int, rows: int, columns: int, tokens: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        sample = torch.randn(batch, unet.config.in_channels, rows * factor, columns * factor, generator=generator)
        values = {"sample": sample, "timestep": 1000 * torch.rand(batch, generator=generator)}
        if context_dim is not None:
            values["encoder_hidden_states"] = torch.randn(batch, tokens, context_dim, generator=generator)
            values["encoder_attention_mask"] = (torch.arange(tokens) < 2).long().expand(batch, -1).contiguous()
        return values

    network = Unconditional() if context_dim is None else Conditional()
    write_onnx(network, inputs(2, 2, 3, 5), axes, "prediction", path)
    check_onnx(network, [inputs(3, 3, 2, 7), inputs(1, 2, 5, 3)], path)


def export_text_encoder(text_encoder: "TextEncoder", limit: int, path: Path) -> None:  # noqa: F821
    """The text encoder as a function of input_ids and attention_mask. limit: the most tokens that it takes."""
    import torch
    from torch import Tensor, nn
    from torch.export import Dim

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text_encoder = text_encoder

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.text_encoder(input_ids, attention_mask).last_hidden_state

    def inputs(batch: int, tokens: int) -> dict[str, Tensor]:
        tokens = min(tokens, limit)
        mask = (torch.arange(tokens) < tokens - 1).long().expand(batch, -1).contiguous()
        return {"input_ids": torch.arange(batch * tokens).reshape(batch, tokens) % 97, "attention_mask": mask}

    batch, tokens = Dim("batch"), Dim("tokens")
    axes = {name: {0: batch, 1: tokens} for name in ("input_ids", "attention_mask")}
    write_onnx(Encoder(), inputs(2, 5), axes, "last_hidden_state", path)
    check_onnx(Encoder(), [inputs(3, 7), inputs(1, 3)], path)


def write_onnx(
    network: "nn.Module",  # noqa: F821
    inputs: dict[str, "Tensor"],  # noqa: F821
    axes: dict[str, dict[int, object]],
    output: str,
    path: Path,
) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that axes of one length share a name, and what is deprecated inside torch
        program = torch.onnx.export(
            network.eval(),
            kwargs=inputs,
            dynamo=True,
            dynamic_shapes=axes,
            input_names=list(inputs),
            output_names=[output],
            opset_version=OPSET,
            verbose=False,
        )
        program.save(path)


def check_onnx(network: Callable[..., "Tensor"], cases: list[dict[str, "Tensor"]], path: Path) -> None:  # noqa: F821
    """Compare with torch at other sizes than the export saw. Raises ValueError if they differ."""
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(path)
    for case in cases:
        with torch.no_grad():
            expected = network(**case)
        (found,) = session.run(None, {name: value.numpy() for name, value in case.items()})
        difference = (torch.from_numpy(found) - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        if not difference <= TOLERANCE:
            shapes = {name: tuple(value.shape) for name, value in case.items()}
            raise ValueError(f"{path.name} differs from torch by {float(difference):.1e} at {shapes}")


def settings_of(pipeline: "TextToImagePipeline") -> dict[str, object]:  # noqa: F821
    """What the sampler needs to know beside the networks."""
    if pipeline.guide_unet is not None:
        raise ValueError("the exported sampler knows no guide_unet: save the pipeline with guide_unet=None first")
    unet = pipeline.unet.config
    text = None
    if pipeline.text_encoder is not None:
        from unet_attn.pipelines.captions import caption_limit

        limit = caption_limit(pipeline.tokenizer, pipeline.text_encoder)
        text = {"max_length": limit, "pad_id": pipeline.tokenizer.pad_token_id}
    return {
        "prediction_type": pipeline.config.prediction_type,
        "sample_size": unet.sample_size,
        "channels": unet.in_channels,
        "downsample_factor": pipeline.unet.downsample_factor,
        "text": text,
        "default_steps": pipeline.config.default_steps,
        "default_guidance_scale": pipeline.config.default_guidance_scale,
        "schedule": schedule_of(pipeline.scheduler, pipeline.config.prediction_type),
    }


def schedule_of(scheduler: "SchedulerMixin", prediction_type: str) -> dict[str, object]:  # noqa: F821
    """The noise schedule. Raises ValueError for a setting that the small sampler does not know."""
    config = scheduler.config
    if type(scheduler).__name__ not in SCHEDULERS:
        raise ValueError(
            f"the exported sampler knows {', '.join(SCHEDULERS)}, not {type(scheduler).__name__}: "
            "save the pipeline with one of those first"
        )
    unknown = (
        "use_dynamic_shifting",
        "shift_terminal",
        "use_karras_sigmas",
        "use_exponential_sigmas",
        "use_beta_sigmas",
        "invert_sigmas",
        "stochastic_sampling",
        "thresholding",
    )
    found = [name for name in unknown if config.get(name)]
    if found:
        raise ValueError(f"the scheduler has {', '.join(found)}, which the exported sampler does not know")

    trained = config.num_train_timesteps
    if prediction_type == "flow":
        bounds = {"sigma_max": float(scheduler.sigma_max), "sigma_min": float(scheduler.sigma_min)}
        return {"num_train_timesteps": trained, "shift": config.shift, **bounds}
    alphas = scheduler.alphas_cumprod.tolist()
    return {
        "num_train_timesteps": trained,
        "alphas_cumprod": alphas,
        # DDIM's own choice of where its last step ends; DDPM's schedulers end in the clean picture
        "final_alpha_cumprod": 1.0 if config.get("set_alpha_to_one", True) else alphas[0],
        "timestep_spacing": config.timestep_spacing,
        "steps_offset": config.get("steps_offset", 0),
        "clip_sample_range": config.clip_sample_range if config.clip_sample else None,
    }


if __name__ == "__main__":
    sys.exit(main())

"""The plan of a quantized Mamba mode, and the network that follows it."""

from __future__ import annotations

from torch import Tensor, nn

from qgate.models.mamba.network import Mamba, MambaMixer
from qgate.models.model import Model
from qgate.modes.calibration import Calibration
from qgate.modes.mode import MambaChoices
from qgate.modes.plan import PlanEntry, numbers_of
from qgate.modes.simulated.mixer import MixerScales, SimulatedMixer
from qgate.modes.simulated.products import IntWeight


def mamba_entries(choices: MambaChoices, model: Model, calibration: Calibration) -> list[PlanEntry]:
    """List the sites of every mixer in the order of the data."""
    network = model.in_basis("rotated").module
    arithmetic = calibration.settings.arithmetic
    entries: list[PlanEntry] = []
    for at, mixer in named_mixers(network):
        for leaf, tensor in mixer_parameters(mixer):
            weight = IntWeight(
                tensor, "fp32" if leaf in ("A_log", "D", "dt_proj:bias") else arithmetic
            )
            scale = float(weight.quantized()[1])
            origin = "absmax / 127" + (", in float16" if weight.arithmetic == "fp16" else "")
            entries.append(PlanEntry(f"{at}.{leaf}", "int8 per tensor", scale, origin))
        for leaf, does, source in _activations(choices):
            site = f"{at}.{source}" if source else None
            scale_of = calibration[site].scale if site else None
            origin = calibration.origin(site) if site else _origin(does)
            scales = numbers_of(scale_of)
            entries.append(PlanEntry(f"{at}.{leaf}", does, scale_of, origin, calibrated=scales))
    return entries


def _origin(does: str) -> str:
    return "amax of the tensor / 127" if "own scale" in does else "no scale"


def mixer_parameters(mixer: MambaMixer) -> list[tuple[str, Tensor]]:
    """List the parameters that a quantized mixer has codes of, by the name of their site."""
    weights = [
        ("in_proj:weight", mixer.in_proj.weight),
        ("conv1d:weight", mixer.conv1d.weight),
        ("conv1d:bias", mixer.conv1d.bias),
        ("x_proj:weight", mixer.x_proj.weight),
        ("dt_proj:weight", mixer.dt_proj.weight),
        ("dt_proj:bias", mixer.dt_proj.bias),
        ("A_log", mixer.A_log),
        ("D", mixer.D),
        ("out_proj:weight", mixer.out_proj.weight),
    ]
    return [(name, tensor) for name, tensor in weights if tensor is not None]


def _activations(choices: MambaChoices) -> list[tuple[str, str, str | None]]:
    """List each site, what is done there, and the site whose scale it uses."""
    even, ties = "int8, ties to even", {"even": "to even", "away": "away"}[choices.conv_rounding]
    first = "float32 (its x half), int8 (its z half)" if choices.dynamic_conv else even
    reads = {
        "codes": f"int8 of the convolution's output, ties {ties}",
        "codes_of_u": f"int8 of scan:u, ties {ties}",
        "u": "scan:u as it is",
    }[choices.path_a]
    on_grid = not choices.float_products or choices.regridded != "none"
    out = "float32 product" if choices.float_products else even
    out += ", then int8, ties to even" if choices.float_products and on_grid else ""
    out_x = out + (" (dt_proj reads it before)" if choices.regridded == "scan" else "")
    return [
        ("in_proj:input", even, "in_proj:input"),
        ("in_proj:output", first, "in_proj:output"),
        ("conv1d:input", "int8 on its own scale" if choices.dynamic_conv else "as in_proj:output",
         None if choices.dynamic_conv else "in_proj:output"),
        ("x_proj:input", reads, None if choices.path_a == "u" else "x_proj:input"),
        ("scan:u", f"{choices.path_b.replace('_', ' ')}, ties {ties}",
         None if choices.path_b == "exact" else "x_proj:input"),
        ("x_proj:output", out_x, "x_proj:output" if on_grid else None),
        ("dt_proj:output", out, "dt_proj:output" if on_grid else None),
        ("scan:output", f"float16; sums in {choices.scan} order", None),
        ("out_proj:input", "int8 after the Hadamard transform, ties away", "out_proj:input"),
        ("out_proj:output", "float16", None),
    ]  # fmt: skip


def named_mixers(network: nn.Module) -> list[tuple[str, MambaMixer]]:
    """List the mixers of a Mamba by name."""
    if not isinstance(network, Mamba):
        raise TypeError(f"a Mamba is needed, not {type(network).__name__}")
    return [(name, m) for name, m in network.named_modules() if isinstance(m, MambaMixer)]


def simulate(network: nn.Module, choices: MambaChoices, calibration: Calibration) -> None:
    """Replace every mixer of a rotated network, in place; the new ones keep no state."""
    network.new_cache = None  # type: ignore[assignment]
    for at, mixer in named_mixers(network):
        scales = MixerScales(
            norm=calibration[f"{at}.in_proj:input"].scale,
            xz=calibration[f"{at}.in_proj:output"].scale,
            u=calibration[f"{at}.x_proj:input"].scale,
            x_proj=calibration[f"{at}.x_proj:output"].scale,
            delta=calibration[f"{at}.dt_proj:output"].scale,
            state=calibration[f"{at}.scan:state"].scale,
            out=calibration[f"{at}.out_proj:input"].scale,
            u_wide=calibration[f"{at}.x_proj:input"].wide or 0.0,
        )
        block, _, leaf = at.rpartition(".")
        simulated = SimulatedMixer(mixer, scales, choices, calibration.settings.arithmetic)
        setattr(network.get_submodule(block), leaf, simulated.eval())

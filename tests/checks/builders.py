"""Minimal documents to judge: a healthy one, and functions that change one part of it."""

from __future__ import annotations

from typing import Any

from normprobe.records import (
    Anatomy,
    AttentionMeasure,
    AttentionSite,
    Basis,
    BoundedNorm,
    Branch,
    BranchGradient,
    BranchScale,
    ComputedWeight,
    Declared,
    Elements,
    Entry,
    GradientMeasure,
    Growth,
    Head,
    HeadLogits,
    Initialisation,
    KindGradients,
    Margins,
    MassiveActivation,
    Measurements,
    NormGain,
    NormSite,
    OpSite,
    Reparametrization,
    ReportData,
    Stream,
    StreamMeasure,
    StreamState,
    Target,
    WeightMeasure,
    WeightSite,
)
from normprobe.records.batchnorm import BatchNormMeasure, BatchNormSite, KeptStatistics
from normprobe.records.cost import CostMeasure, NormCost
from normprobe.records.optimizer import NormStep, OptimizerGroup, OptimizerMeasure


def norm(path: str = "blocks.0.norm", **more: Any) -> NormSite:
    """A fused RMS norm with eps 1e-5 inside the root, in use."""
    facts: dict[str, Any] = {
        "kind": "rmsnorm",
        "subtracts_mean": False,
        "affine": "weight",
        "axes": (-1,),
        "weight": f"{path}.weight",
        "eps": 1e-5,
        "eps_placement": "inside_sqrt",
        "reduction": "native",
        "role": "pre",
        "class_name": "RMSNorm",
        "fused": True,
        "executions": 1,
    }
    return NormSite(path=path, **facts | more)


def elements(parameter: str = "norm.weight", value: float = 1.0, **more: Any) -> Elements:
    """Sixteen numbers, all `value`."""
    facts: dict[str, Any] = {
        "dtype": "float32",
        "count": 16,
        "non_finite": 0,
        "zeros": 16 if value == 0 else 0,
        "negative": 0,
        "stored_negative": 0,
        "subnormal": 0,
        "smallest": value,
        "largest": value,
        "median": value,
        "mean": value,
        "std": 0.0,
        "typical": abs(value),
        "peak": abs(value),
        "peak_at": 0,
    }
    return Elements(parameter=parameter, **facts | more)


def moved(parameter: str = "norm.weight", median: float = 0.5, **more: Any) -> Elements:
    """Sixteen positive numbers about `median`, as training leaves them."""
    facts: dict[str, Any] = {"smallest": 0.8 * median, "largest": 1.5 * median, "std": 0.1 * median}
    return elements(parameter, median, **facts | {"peak": 1.5 * median, "peak_at": 3} | more)


def gain(
    path: str = "blocks.0.norm", held: Elements | None = None, offset: Elements | None = None, one_plus: bool = False
) -> NormGain:
    """A gain of 1 without an offset, unless told otherwise."""
    return NormGain(path=path, one_plus=one_plus, gain=held or elements(f"{path}.weight"), offset=offset)


def init(drawn: float | None = 1.0, trained: bool | None = None, **stds: float) -> Initialisation:
    """What is said of weights of which that share is as drawn; of some, the standard deviation."""
    basis = Basis(unit="1", dtype="float32", count=64)
    facts: dict[str, Any] = {
        "roles": ("writer",),
        "distribution": "normal",
        "mean": 0.0,
        "gain_back": 1.0,
        "followed_by": "none",
        "moment": None,
        "recipes": (),
        "basis": basis,
    }
    weights = tuple(
        WeightMeasure(parameter=name, std=std, interval=(std, std), gain=std, **facts) for name, std in stds.items()
    )
    return Initialisation(trained=trained, drawn=drawn, evidence=(), writes=(2,), roles=(), weights=weights)


def group(decay: float | None = 0.0, step: float | None = 1e-3, reason: str = "", **more: Any) -> OptimizerGroup:
    """A group of Adam without weight decay."""
    facts: dict[str, Any] = {"lr": 1e-3, "weight_decay": None if decay is None else 100 * decay}
    return OptimizerGroup(decay=decay, step=step, reason=reason, **facts | more)


def norm_step(path: str = "blocks.0.norm", lost: float | None = 0.0, **more: Any) -> NormStep:
    """A gain in float32 that the first group of an optimiser trains."""
    facts: dict[str, Any] = {"parameter": f"{path}.weight", "part": "gain", "one_plus": False, "group": 0}
    return NormStep(path=path, lost=lost, **facts | {"dtype": "float32", "step": 1e-3} | more)


def optimizer(*steps: NormStep, groups: tuple[OptimizerGroup, ...] | None = None, **more: Any) -> OptimizerMeasure:
    """Adam, as it trains these gains and offsets."""
    facts: dict[str, Any] = {"name": "Adam", "gains": 3, "offsets": 2, "foreign": 0}
    return OptimizerMeasure(groups=groups or (group(),), norms=steps, **facts | more)


def branch(path: str, **more: Any) -> Branch:
    """A pre-norm MLP that is added in `path`."""
    facts: dict[str, Any] = {
        "block": path,
        "kind": "mlp",
        "placement": "pre",
        "pre_norm": f"{path}.norm",
        "readers": (f"{path}.fc.weight",),
        "writers": (f"{path}.proj.weight",),
        "add": OpSite(path=path, op="aten.add.Tensor"),
    }
    return Branch(path=path, **facts | more)


def stream(**more: Any) -> Stream:
    """A pre-norm stream of two writes with a final norm."""
    facts: dict[str, Any] = {
        "name": "blocks",
        "width": 8,
        "depth": 2,
        "placement": "pre",
        "final_norm": "norm",
        "needs_final_norm": True,
        "branches": (branch("blocks.0"), branch("blocks.1")),
    }
    return Stream(**facts | more)


def site(path: str = "blocks.0.attn", **more: Any) -> AttentionSite:
    """Attention with two heads."""
    facts: dict[str, Any] = {
        "heads": 2,
        "kv_heads": 2,
        "kernel": "aten._softmax",
        "head_dim": 4,
        "scale": 0.5,
        "site": OpSite(path=path, op="aten._scaled_dot_product_flash_attention_for_cpu.default"),
    }
    return AttentionSite(path=path, **facts | more)


def state(index: int, abs_max: float = 3.0, rms: float = 1.0, **more: Any) -> StreamState:
    """The stream after write `index`."""
    facts: dict[str, Any] = {
        "branch": index,
        "path": f"blocks.{index}",
        "block": f"blocks.{index}",
        "kind": "mlp",
        "rms_median": rms,
        "rms_p99": rms * 1.1,
        "rms_max": rms * 1.2,
        "rms_argmax": 3,
        "position": 3,
        "abs_max": abs_max,
        "abs_argmax_channel": 5,
        "mean": 0.0,
        "std": rms,
        "first_rms": rms,
        "other_rms": rms,
        "token_cosine": 0.1,
        "stable_rank": 4.0,
        "write_rms": 0.5 * rms,
        "write_max": 0.6 * rms,
        "write_ratio": 0.5,
        "write_share": 0.4,
        "write_cosine": 0.1,
        "angle": 0.4,
        "bf16_loss": 0.004,
        "fp16_loss": 0.0005,
    }
    return StreamState(**facts | more)


def residual(*states: StreamState, dtype: str = "float32", **more: Any) -> StreamMeasure:
    """The measured stream `blocks` with entry RMS 0.5."""
    facts: dict[str, Any] = {
        "stream": "blocks",
        "basis": Basis(unit="1", dtype=dtype, count=16),
        "entry_rms": 0.5,
        "entry_cosine": 0.1,
        "states": states or (state(0), state(1)),
        "growth": Growth(exponent=0.5, interval=(0.4, 0.6), r_squared=0.9, writes=2),
        "independent_rms": 0.9,
        "effective_depth": 2.0,
    }
    return StreamMeasure(**facts | more)


def logits(
    *largest: float,
    path: str = "blocks.0.attn",
    bound: float = 9.0,
    exact: bool = False,
    dtype: str = "float32",
    **more: Any,
) -> AttentionMeasure:
    """One measured site with a head for each number; `more` are facts of every head."""
    heads = tuple(
        HeadLogits(
            **{
                "head": index,
                "sampled_max": value,
                "bound": bound,
                "std": 1.0,
                "entropy": 0.7,
                "saturated": 0.0,
                "first_token": 0.1,
                "uncapped_max": value,
                "q_rms": 1.0,
                "k_rms": 1.0,
                "margins": Margins(std=0.0, entropy=0.0, saturated=0.0, first_token=0.0),
            }
            | more
        )
        for index, value in enumerate(largest)
    )
    return AttentionMeasure(
        path=path, basis=Basis(unit="logit", dtype=dtype, count=64, exact=exact), rows=64, heads=heads
    )


def massive(ratio: float, channel: int = 5, position: int = 0) -> MassiveActivation:
    """One entry, at the first token unless told otherwise."""
    return MassiveActivation(channel=channel, position=position, value=-800.0, ratio=ratio, share=0.9, first=0, last=1)


def gradients(
    norm_: float = 1.0, value: float = 2.0, sizes: tuple[float, ...] = (0.1, 0.1), **more: Any
) -> GradientMeasure:
    """Gradients of two branches with parameter gradients of one norm, the stream's of these sizes."""
    rows = tuple(
        BranchGradient(
            stream="blocks",
            branch=index,
            path=f"blocks.{index}",
            kind="mlp",
            parameter_norm=norm_,
            activation_rms=size,
            parameters=100,
        )
        for index, size in enumerate(sizes)
    )
    facts: dict[str, Any] = {
        "loss": "cross entropy",
        "basis": Basis(unit="1", dtype="float32", count=16),
        "branches": rows,
        "stream": "blocks",
        "last_to_first": 1.0,
        "slope": 0.0,
    }
    return GradientMeasure(value=value, **facts | more)


def sloping(slope: float = -1.0, half: float = 0.2, count: int = 9, **more: Any) -> GradientMeasure:
    """Gradients whose parameters' norms follow a line through `count` branches, those of the stream being equal."""
    kinds = (KindGradients(kind="mlp", branches=count, span=count - 1, last_to_first=1.0),)
    line = {"slope": slope, "interval": (slope - half, slope + half), "kinds": kinds}
    return gradients(sizes=(0.1,) * count, **line, **more)


def kept(**more: Any) -> KeptStatistics:
    """Stored statistics that fit the batch."""
    facts: dict[str, Any] = {
        "mean_shift": 0.1,
        "mean_shift_max": 0.3,
        "variance_ratio": 1.1,
        "variance_ratio_min": 0.8,
        "variance_ratio_max": 1.2,
        "divergence": 0.01,
        "divergence_max": 0.05,
        "worst_channel": 2,
    }
    return KeptStatistics(**facts | more)


def batch_norm(path: str = "bn", **more: Any) -> BatchNormSite:
    """A batch norm in eval mode, whose statistics have seen a hundred batches."""
    facts: dict[str, Any] = {
        "channels": 4,
        "count": 64,
        "shape": (4, 4, 4, 4),
        "training": False,
        "learns": True,
        "synchronised": False,
        "keeps": "moving",
        "default": False,
        "finite": True,
        "below_eps": 0,
        "zero_variances": 0,
        "momentum": 0.1,
        "tracked": 100,
        "initial_share": 0.9**100,
        "kept": kept(),
    }
    return BatchNormSite(path=path, **facts | more)


def batchnorm(*sites: BatchNormSite, samples: int = 4, **more: Any) -> BatchNormMeasure:
    """Batch norms on one batch, train mode run too, without a difference."""
    facts: dict[str, Any] = {
        "training": False,
        "others_learn": True,
        "processes": 1,
        "train_eval_gap": 0.01,
        "halves_gap": 0.01,
        "untouched": True,
    }
    return BatchNormMeasure(basis=Basis(unit="1", dtype="float32", count=samples), sites=sites, **facts | more)


def weight(parameter: str = "blocks.0.fc.weight", **more: Any) -> WeightMeasure:
    """A reader drawn by LeCun's recipe, 8 inputs and 16 outputs."""
    facts: dict[str, Any] = {
        "roles": ("reader",),
        "distribution": "normal",
        "mean": 0.0,
        "std": 0.3536,
        "interval": (0.35, 0.36),
        "gain": 1.0,
        "gain_back": 1.4,
        "followed_by": "gelu",
        "moment": 0.5,
        "recipes": ("lecun",),
        "basis": Basis(unit="1", dtype="float32", count=128),
    }
    return WeightMeasure(parameter=parameter, **facts | more)


def weight_site(parameter: str = "blocks.0.fc.weight", **more: Any) -> WeightSite:
    """The reader of the first branch, stored as [out, in]."""
    facts: dict[str, Any] = {
        "roles": ("reader",),
        "stream": 0,
        "branch": 0,
        "shape": (16, 8),
        "fan_in": 8,
        "fan_out": 16,
        "output_axis": 0,
        "kind": "linear",
        "operand": 1,
        "followed_by": "gelu",
        "site": OpSite(path="blocks.0.fc", op="aten.addmm"),
    }
    return WeightSite(parameter=parameter, **facts | more)


def drawn(*weights: WeightMeasure, trained: bool | None = False, **more: Any) -> Initialisation:
    """Weights that look as they were drawn."""
    facts: dict[str, Any] = {"evidence": (), "writes": (2,), "roles": ()}
    return Initialisation(trained=trained, weights=weights or (weight(),), **facts | more)


def normed_weight(path: str = "fc", **more: Any) -> Reparametrization:
    """g · v / ‖v‖ for each of the rows of v, without an eps."""
    facts: dict[str, Any] = {"kind": "weight_norm", "parameter": f"{path}.v", "gain": f"{path}.g", "axes": (1,)}
    return Reparametrization(path=path, **facts | {"floor": None, "zeros": False} | more)


def slices(path: str = "fc", **more: Any) -> ComputedWeight:
    """Sixteen sound rows of eight elements, and a gain for each."""
    facts: dict[str, Any] = {"count": 16, "elements": 8, "non_finite": 0, "empty": 0, "smallest": 0.5, "smallest_at": 3}
    facts |= {"parameter": f"{path}.v", "dtype": "float32", "median": 0.9, "gains": 16, "zero_gains": 0}
    return ComputedWeight(path=path, **facts | more)


def bounded(path: str = "blocks.0.norm", **more: Any) -> BoundedNorm:
    """tanh(0.5 · x) of unit normal x."""
    facts: dict[str, Any] = {"input_rms": 1.0, "output_rms": 0.42, "saturated": 0.0}
    return BoundedNorm(path=path, basis=Basis(unit="1", dtype="float32", count=64), **facts | more)


def norm_cost(path: str = "blocks.0.norm", **more: Any) -> NormCost:
    """A norm of six operations that takes a hundredth of a second."""
    facts: dict[str, Any] = {"calls": 1, "operations": 6, "reductions": 1, "bytes_moved": 900, "bytes_needed": 300}
    return NormCost(path=path, **facts | {"fused": False, "seconds": 0.01} | more)


def cost(*norms: NormCost) -> CostMeasure:
    """A forward of one second with these norms in it."""
    spent = sum(norm.seconds for norm in norms)
    facts: dict[str, Any] = {"device": "cpu", "forward_seconds": 1.0, "one_token_seconds": None}
    return CostMeasure(
        basis=Basis(unit="s", dtype="float32", count=5), norms=norms, share=spent, one_token_share=None, **facts
    )


def unnormed(depth: int, scale: float | None = 0.98, **more: Any) -> Stream:
    """A stream that constants hold: branches without norms, x + 0.2 · f(0.98 · x)."""
    facts: dict[str, Any] = {"placement": "none", "pre_norm": None, "kind": "conv"}
    facts["branch_scale"] = BranchScale(kind="constant", value=0.2)
    sites = [OpSite(path=f"blocks.{i}.fc", op="aten.convolution.default") for i in range(depth)]
    branches = tuple(
        branch(f"blocks.{i}", **facts | {"entry": Entry(scale=scale, site=site)} | more) for i, site in enumerate(sites)
    )
    return stream(placement="none", depth=depth, needs_final_norm=False, final_norm=None, branches=branches)


def given(*stds: float | None) -> list[StreamState]:
    """States after writes whose branches were given inputs of these standard deviations."""
    return [state(i, input_std=std) for i, std in enumerate(stds)]


def document(
    *,
    reparametrizations: tuple[Reparametrization, ...] = (),
    norms: tuple[NormSite, ...] | None = None,
    streams: tuple[Stream, ...] | None = None,
    attention: tuple[AttentionSite, ...] | None = None,
    dtype: str = "float32",
    level: Any = "backward",
    declared: tuple[Declared, ...] = (Declared(path=".", field="norm_eps", fact="eps", stated=1e-5, value=1e-5),),
    weights: tuple[WeightSite, ...] = (),
    **measured: Any,
) -> ReportData:
    """A healthy document, with the given parts in place of its own."""
    sites = (norm(), norm("blocks.1.norm"), norm("norm", role="final")) if norms is None else norms
    measurements: dict[str, Any] = {
        "norm_gains": tuple(gain(site.path) for site in sites),
        "init": init(),
        "optimizer": optimizer(),
        "residual": (residual(),),
        "attention": (logits(3.0, 4.0),),
        "output_finite": True,
        "gradients": gradients(slope=0.0, interval=(-0.1, 0.1)),
    }
    return ReportData(
        target=Target(name="tiny", dtype=dtype),
        level=level,
        declared=declared,
        anatomy=Anatomy(
            norms=sites,
            streams=(stream(),) if streams is None else streams,
            attention=(site(),) if attention is None else attention,
            head=Head(path="head.weight"),
            weights=weights,
            reparametrizations=reparametrizations,
        ),
        measurements=Measurements(**measurements | measured),
    )


def unscaled(writes: int, recipes: tuple[str, ...] = ("fixed_0.02",), grown: float = 2.5) -> ReportData:
    """A pre-norm stream of so many writes from weights of one standard deviation, that grows so often its entry."""
    branches = tuple(branch(f"blocks.{i}") for i in range(writes))
    known, found = [], []
    for i in range(writes):
        for name, role in (("fc", "reader"), ("proj", "writer")):
            known.append(weight_site(f"blocks.{i}.{name}.weight", roles=(role,), branch=i))
            fits = recipes if role == "writer" else ("fixed_0.02",)
            drawn_at: dict[str, Any] = {"std": 0.02, "interval": (0.0199, 0.0201), "recipes": fits}
            found.append(weight(f"blocks.{i}.{name}.weight", roles=(role,), **drawn_at))
    return document(
        streams=(stream(branches=branches, depth=writes),),
        residual=(residual(state(0, rms=0.5), state(1, rms=0.5 * grown)),),
        weights=tuple(known),
        init=drawn(*found),
    )

"""Which modules of the model are norms, found by running a copy of each distinct candidate."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule

from normprobe.anatomy.flow.ops import Role
from normprobe.anatomy.flow.steps import Group
from normprobe.anatomy.norm_sites.alike import settings
from normprobe.anatomy.norm_sites.candidates import Candidates
from normprobe.anatomy.norm_sites.graph_subject import GraphSubject, without_casts
from normprobe.capture.calls import CallSpec, TensorSpec
from normprobe.capture.trace import Call, Trace
from normprobe.errors import UnreadableAnatomyError
from normprobe.norms.identify import identify, identify_module
from normprobe.records import NormSite, NormSpec, Skipped

NOT_NORMS = frozenset({"affine", "identity"})
_NAMES = "weight", "bias"


@dataclass
class Found:
    """Norm sites in order of first execution, and the groups of nodes that each of their runs consists of."""

    sites: list[NormSite] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def find_module_norms(model: nn.Module, trace: Trace, candidates: Candidates) -> Found:
    """Identify every module run of `trace` that is a norm.

    A module around an identified norm that adds nothing of its own is not listed; the inner one is. One that adds the
    gain to a norm without any is listed instead of it.
    """
    finder = _Finder(model, trace, candidates)
    calls = [call for call in candidates.calls() if finder.visit(call)]
    return _collect(finder, [call for call in calls[::-1] if call.id in finder.specs])


class _Finder:
    def __init__(self, model: nn.Module, trace: Trace, candidates: Candidates) -> None:
        self.model, self.trace, self.candidates = model, trace, candidates
        self.cache: dict[Any, tuple[NormSpec | None, bool]] = {}
        self.specs: dict[int, NormSpec] = {}
        self.nodes: dict[int, frozenset[int]] = {}
        self.covered: set[int] = set()
        self.unread: dict[str, dict[str, None]] = {}  # paths by why their modules could not be run on their own

    def skipped(self) -> list[Skipped]:
        """What could not be read, all modules of one reason together under the one that ran first."""
        found = []
        for why, paths in self.unread.items():
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            found.append(Skipped(what=f"behaviour of {list(paths)[-1]}{more}", why=why))
        return found

    def visit(self, call: Call) -> bool:
        """Identify one candidate; True if it is a norm, and no norm was found inside it but one that lacks its gain."""
        nodes = self.candidates.nodes(call)
        inner = self._plain_inside(nodes) if nodes & self.covered else None
        if (nodes & self.covered and inner is None) or not nodes:
            return False
        key = settings(self._module(call)), self.candidates.signature(call)
        if key not in self.cache:
            self.cache[key] = self._identify(call)
        spec, whole = self.cache[key]
        if spec is None or (inner is not None and not (whole and _gains(spec, self.specs[inner]))):
            return False
        if inner is not None:
            del self.specs[inner]
        before = None if whole else self.candidates.before_tail(call)
        self.nodes[call.id] = nodes if before is None else before[1]
        self.covered |= nodes
        self.specs[call.id] = spec
        return True

    def _module(self, call: Call) -> nn.Module:
        return self.model.get_submodule("" if call.path == "." else call.path)

    def _plain_inside(self, nodes: frozenset[int]) -> int | None:
        """The only norm found among `nodes`, if it has no gain and other nodes use parameters."""
        inside = [call for call in self.specs if self.nodes[call] & nodes]
        if len(inside) != 1 or self.specs[inside[0]].affine != "none":
            return None
        around = [self.trace.nodes[i] for i in nodes - self.nodes[inside[0]]]
        gains = any(self.candidates.levels.parameters(v) for n in around for v in n.inputs)
        return inside[0] if gains else None

    def _identify(self, call: Call) -> tuple[NormSpec | None, bool]:
        """What a call computes if it is a norm, and whether that is all of it: an activation may follow the norm."""
        module = self._module(call)
        failures: list[str] = []
        spec = identify_module(module, self.candidates.spec(call), failures)
        if failures:
            spec = self._from_operations(call)
            instead = "" if spec is None else "\n  its recorded operations were run instead"
            for why in failures:
                self.unread.setdefault(why + instead, {})[call.path] = None
        before = None if failures or _fits(spec) else self.candidates.before_tail(call)
        inner = None if before is None else identify_module(module, self.candidates.spec(call), tail=before[0])
        if spec is not None and spec.kind not in NOT_NORMS and not _fits(inner):
            return spec, True
        return (None if inner is None or inner.kind in NOT_NORMS else inner), False

    def _from_operations(self, call: Call) -> NormSpec | None:
        """What the recorded operations of a module compute that cannot be copied or run on its own."""
        trace, levels = self.trace, self.candidates.levels
        nodes = [trace.nodes[i] for i in sorted(self.candidates.nodes(call))]
        main, end = self.candidates.main_input(call), call.outputs[self.candidates.normed(call) or 0]
        if main is None:
            return None
        try:
            spec = identify(GraphSubject(self.model, trace, levels, nodes, main, end))
        except UnreadableAnatomyError:
            return None
        return None if spec is None else _relative(without_casts(spec, _dtype(trace, main)), call.path)


def _relative(spec: NormSpec, path: str) -> NormSpec:
    """The spec with names relative to the module at `path`."""
    prefix = "" if path == "." else path + "."
    own = {k: n.removeprefix(prefix) if n.startswith(prefix) else None for k in _NAMES if (n := getattr(spec, k))}
    return spec.model_copy(update=own)


def _dtype(trace: Trace, value: int) -> str:
    return str(trace.values[value].dtype).removeprefix("torch.")


def _fits(spec: NormSpec | None) -> bool:
    """Whether something is a norm of a known form."""
    return spec is not None and spec.kind not in NOT_NORMS and spec.kind != "unknown"


def _gains(outer: NormSpec, inner: NormSpec) -> bool:
    """Whether a module is the same norm as the one inside it, with a gain that it adds."""
    same = (outer.subtracts_mean, outer.axes, outer.groups) == (inner.subtracts_mean, inner.axes, inner.groups)
    return same and outer.kind != "unknown" and outer.affine not in ("none", "other")


def _collect(finder: _Finder, calls: list[Call]) -> Found:
    found, index = Found(skipped=finder.skipped()), {}
    runs: dict[str, int] = {}
    for call in calls:
        runs[call.path] = runs.get(call.path, 0) + 1
    for call in calls:
        main = finder.candidates.main_input(call)
        assert main is not None
        dtype = _dtype(finder.trace, main)
        if call.path not in index:
            index[call.path] = len(found.sites)
            found.sites.append(_site(finder.model, call.path, finder.specs[call.id], runs[call.path], dtype))
        found.groups.append(Group(Role.NORM, finder.nodes[call.id], main, call.id, index[call.path]))
    return found


def _site(model: nn.Module, path: str, spec: NormSpec, executions: int, dtype: str = "") -> NormSite:
    module = model.get_submodule("" if path == "." else path)
    prefix = "" if path == "." else path + "."
    facts = spec.model_dump() | {
        "weight": prefix + spec.weight if spec.weight else None,
        "bias": prefix + spec.bias if spec.bias else None,
    }
    return NormSite(
        **facts,
        path=path,
        dtype=dtype,
        executions=executions,
        executed=executions > 0,
        role="inner" if executions else "unused",
        class_name=type(module).__name__,
    )


def find_static_norms(model: nn.Module, candidates: Candidates) -> list[NormSite]:
    """Norms that ran on static values alone; no signal passes them, so they are no steps of the flow."""
    sites: dict[str, NormSite] = {}
    covered: set[int] = set()
    for call in candidates.static_calls():
        nodes = set(range(call.first_node, call.last_node))
        if nodes & covered or call.spec is None:
            continue
        spec = identify_module(model.get_submodule("" if call.path == "." else call.path), call.spec)
        if spec is not None and spec.kind not in NOT_NORMS:
            covered |= nodes
            runs = sites[call.path].executions + 1 if call.path in sites else 1
            sites[call.path] = _site(model, call.path, spec, runs)
    return list(sites.values())


def find_unused_norms(model: nn.Module, trace: Trace) -> list[NormSite]:
    """Norms among the modules that hold parameters of their own and never ran in this forward.

    They are fed inputs that fit the shape of their parameters; what cannot be fed is left out. A module whose
    parameters were used is not meant, though its own forward never ran (a fused kernel may have taken them).
    """
    read = {node.name for node in trace.nodes if node.op == "parameter"}
    ran = {call.path for call in trace.calls} | {name.rpartition(".")[0] for name in read}
    sites: dict[str, NormSite] = {}
    for path, module in model.named_modules():
        if not path or path in ran or isinstance(module, ScriptModule) or any(True for _ in module.children()):
            continue
        spec = _identify_unused(module)
        if spec is not None and spec.kind not in NOT_NORMS:
            sites[path] = _site(model, path, spec, 0)
    return [
        site.model_copy(update={"idle_beside": tuple(_idle_beside(model, path, ran | read | sites.keys()))})
        for path, site in sites.items()
    ]


def _idle_beside(model: nn.Module, path: str, known: Set[str]) -> Iterator[str]:
    """The modules with parameters and the parameters beside the module at `path`, of which nothing is `known` to have
    run or to have been read, or to be a norm."""
    parent = path.rpartition(".")[0]
    holder = model.get_submodule(parent)
    modules = [name for name, module in holder.named_children() if any(True for _ in module.parameters())]
    for name in (*modules, *(name for name, _ in holder.named_parameters(recurse=False))):
        beside = f"{parent}.{name}" if parent else name
        if not any(one == beside or one.startswith(f"{beside}.") for one in known):
            yield beside


def _identify_unused(module: nn.Module) -> NormSpec | None:
    state = [*module.parameters(), *module.buffers()]
    shapes = {tuple(t.shape) for t in state if t.dim()}
    if len(shapes) != 1:
        return None
    axes, dtype = shapes.pop(), next((t.dtype for t in state if t.is_floating_point()), torch.float32)
    channels = [(2, *axes, *rest) for rest in ((4, 4), (4,), (2, 4, 4))] if len(axes) == 1 else []
    for shape in ((2, 4, *axes), *channels):
        call = CallSpec((TensorSpec(shape, dtype, state[0].device),), {})
        spec = identify_module(module, call)
        if spec is not None:
            return spec
    return None

"""The Anatomy of known architectures against facts written down by hand."""

from __future__ import annotations

import pytest

from normprobe.records import Branch, NormSite, Stream
from tests.anatomy.facts import FACTS, BranchFacts, Facts, StreamFacts
from tests.anatomy.reading import named
from tests.models import HEADS, LAYERS, WIDTH

every_architecture = pytest.mark.parametrize("name", FACTS)


def expected_roles(facts: Facts) -> dict[str, str]:
    """Every norm of the architecture with its role."""
    roles = dict(facts.others)
    for stream in facts.streams:
        for layer in range(LAYERS):
            block = f"{stream.name}.{layer}"
            for branch in stream.branches:
                places = (("pre", branch.pre), ("output", branch.output), ("post", branch.post))
                roles |= {f"{block}.{path}": role for role, path in places if path}
            roles |= {f"{block}.{path}": role for path, role in facts.below.items()}
        if stream.final:
            roles[stream.final] = "final"
    return roles


def under(block: str, path: str | None) -> str | None:
    return f"{block}.{path}" if path else None


def branch_facts(block: str, facts: BranchFacts) -> dict[str, object]:
    return {
        "block": block,
        "kind": facts.kind,
        "placement": facts.placement,
        "parallel": facts.parallel,
        "pre_norm": under(block, facts.pre),
        "output_norm": under(block, facts.output),
        "post_norm": under(block, facts.post),
        "readers": {f"{block}.{p}" for p in facts.readers},
        "writers": {f"{block}.{p}" for p in facts.writers},
        "skip_scale": 1.0,
        "branch_scale": "none",
    }


def found_facts(branch: Branch) -> dict[str, object]:
    found = {k: getattr(branch, k) for k in ("block", "kind", "placement", "parallel", "skip_scale")}
    found |= {k: getattr(branch, k) for k in ("pre_norm", "output_norm", "post_norm")}
    found |= {"readers": set(branch.readers), "writers": set(branch.writers)}
    return found | {"branch_scale": branch.branch_scale.kind}


@every_architecture
def test_roles_of_all_norms(name: str) -> None:
    assert {n.path: n.role for n in named(name).norms} == expected_roles(FACTS[name])


@every_architecture
def test_behaviour_of_all_norms(name: str) -> None:
    norm = FACTS[name].norm

    def facts(site: NormSite) -> tuple[object, ...]:
        return site.kind, site.affine, site.eps_placement, site.subtracts_mean, site.module, site.executions

    expected = norm.kind, norm.affine, "inside_sqrt", norm.kind == "layernorm", True, 1
    sites = named(name).norms
    assert {n.path: facts(n) for n in sites} == {n.path: expected for n in sites}
    assert {n.path: n.eps for n in sites} == {n.path: pytest.approx(norm.eps, rel=1e-2) for n in sites}


@every_architecture
def test_norm_parameters_by_name(name: str) -> None:
    for norm in named(name).norms:
        assert norm.weight == f"{norm.path}.weight"
        assert norm.bias == (f"{norm.path}.bias" if norm.affine == "weight+bias" else None)


@every_architecture
def test_streams(name: str) -> None:
    found, expected = named(name).streams, FACTS[name].streams
    assert [s.name for s in found] == [s.name for s in expected]
    for stream, facts in zip(found, expected, strict=True):
        assert_stream(stream, facts)


def assert_stream(stream: Stream, facts: StreamFacts) -> None:
    assert (stream.width, stream.depth) == (WIDTH, LAYERS * len(facts.branches))
    assert {stream.placement} == {b.placement for b in facts.branches}
    assert stream.parallel == any(b.parallel for b in facts.branches)
    assert (stream.entry_norm, stream.final_norm) == (facts.entry, facts.final)
    assert stream.needs_final_norm is facts.needed
    assert stream.input_multiplier == pytest.approx(facts.multiplier)
    assert (stream.feature_axis, stream.raw_readers) == (-1, ())


@every_architecture
def test_branches(name: str) -> None:
    for stream, facts in zip(named(name).streams, FACTS[name].streams, strict=True):
        expected = [branch_facts(f"{stream.name}.{i}", b) for i in range(LAYERS) for b in facts.branches]
        assert [found_facts(b) for b in stream.branches] == expected


@every_architecture
def test_attention_sites(name: str) -> None:
    facts, sites = FACTS[name].attention, named(name).attention
    assert len(sites) == FACTS[name].sites
    for site in sites:
        assert (site.heads, site.kv_heads, site.head_dim) == (HEADS, facts.kv_heads, WIDTH // HEADS)
        assert site.scale == pytest.approx(facts.scale)
        assert site.softcap == facts.softcap
        if facts.qk_axis is None:
            assert site.qk_norm is None
            continue
        norm = site.qk_norm
        assert norm is not None
        assert (norm.kind, norm.axis, norm.rope) == ("rmsnorm", facts.qk_axis, "before")
        assert (norm.query, norm.key) == (f"{site.path}.q_norm", f"{site.path}.k_norm")


@every_architecture
def test_head(name: str) -> None:
    facts, head = FACTS[name], named(name).head
    if facts.head is None:
        assert head is None
        return
    assert head is not None
    assert (head.path, head.tied_to, head.softcap) == (facts.head, facts.tied, facts.softcap)
    assert head.logit_multiplier == pytest.approx(facts.logits)


def test_cross_attention_is_told_from_attention() -> None:
    cross = {site.path for site in named("t5").attention if site.cross}
    assert cross == {f"decoder.block.{i}.layer.1.EncDecAttention" for i in range(LAYERS)}

"""`only` chooses branches by the names that plans print; one that covers nothing is told which places there are."""

from __future__ import annotations

import pytest

from normprobe.errors import RewriteError
from normprobe.rewrites import (
    AddOutputNorms,
    AddQKNorm,
    FoldGains,
    Initialise,
    PlainWeights,
    Refusal,
    Reparametrise,
    Rewrite,
    ScaleResidual,
    make_plan,
)
from normprobe.rewrites.refusals import reasons_of, told_briefly
from tests.models import gpt2, llama

H = "transformer.h."


def writers(rewrite: Rewrite) -> list[str]:
    """The modules that change in a GPT-2, in order."""
    model, inputs = gpt2()
    return [site.path for site in make_plan(model, [rewrite], inputs).steps[0][1].sites]


@pytest.mark.parametrize("kind", [ScaleResidual, AddOutputNorms])
@pytest.mark.parametrize(
    ("only", "found"),
    [
        (f"{H}*.mlp.*", [f"{H}0.mlp", f"{H}1.mlp"]),
        (f"{H}*.mlp", [f"{H}0.mlp", f"{H}1.mlp"]),
        ("*.attn.c_proj.weight", [f"{H}0.attn", f"{H}1.attn"]),
        (f"{H}1.attn", [f"{H}1.attn"]),
        (f"{H}0", [f"{H}0.attn", f"{H}0.mlp"]),
        ((f"{H}0.attn", f"{H}1.mlp"), [f"{H}0.attn", f"{H}1.mlp"]),
    ],
)
def test_a_branch_is_called_by_what_is_in_it(kind: type[ScaleResidual], only: str, found: list[str]) -> None:
    modules = [path.removesuffix(".c_proj").removesuffix(".dropout") for path in writers(kind(only=only))]
    assert [path.removesuffix(".resid_dropout") for path in modules] == found


@pytest.mark.parametrize(
    ("rewrite", "named"),
    [
        (FoldGains(only="transformer.ln_g"), r"covers no place of FoldGains.*transformer.h.0.ln_1.*try: only='transf"),
        (
            ScaleResidual(only="h.*.ml.*"),
            r"covers no place of ScaleResidual.*transformer.h.0.attn, transformer.h.0.mlp",
        ),
        (AddQKNorm(only="h.9"), r"covers no place of AddQKNorm.*transformer.h.0.attn"),
        (Reparametrise(only="wieght"), r"covers no place of Reparametrise.*transformer.h.0.attn.c_attn.weight"),
        (Initialise(only="writer"), r"covers no place of Initialise.*try: only='writers'"),
        (FoldGains(only=("a", "b")), r"only='a' covers no place of FoldGains"),
        (FoldGains(only=(f"{H}*", "b")), r"only='b' covers no place of FoldGains"),
    ],
    ids=lambda each: each.name if isinstance(each, Rewrite) else "",
)
def test_a_pattern_that_covers_nothing_is_told_so(rewrite: Rewrite, named: str) -> None:
    model, inputs = gpt2()
    with pytest.raises(RewriteError, match=rf"(?s){named}"):
        make_plan(model, [rewrite], inputs)


def test_where_there_is_no_place_or_none_is_wanted_no_pattern_is_wrong() -> None:
    model, inputs = llama()
    for rewrite in (PlainWeights(only="x"), FoldGains(only="x", expect=0)):
        [(_, found)] = make_plan(model, [rewrite], inputs).steps
        assert (found.sites, found.refused) == ((), ())


def test_roles_and_names_choose_weights() -> None:
    assert writers(Initialise(only="embeddings")) == ["transformer.wte", "transformer.wpe"]


def test_a_reason_is_said_once() -> None:
    many = [Refusal(f"h.{i}", "no bias") for i in range(48)]
    assert reasons_of([*many, Refusal("ln", "shared")]) == ["48 places (h.0, h.1, h.2, …): no bias", "ln: shared"]
    assert reasons_of(many[:2]) == ["h.0, h.1: no bias"]


def test_reasons_that_differ_by_numbers_are_one_in_brief() -> None:
    many = [Refusal(f"h.{i}.ln", f"add in h.{i}.attn reads it too, 1.5 of it") for i in range(4)]
    assert len(reasons_of(many)) == 4
    assert reasons_of(many, brief=True) == [
        "4 places (h.0.ln, h.1.ln, h.2.ln, …): add in h.*.attn reads it too, 1.5 of it"
    ]
    assert reasons_of(many[:3], brief=True) == reasons_of(many[:3])


def test_an_error_names_the_first_reasons() -> None:
    assert told_briefly([Refusal(f"h.{i}", f"reason {i}") for i in range(6)]) == (
        "h.0: reason 0; h.1: reason 1; h.2: reason 2; and 3 reasons more"
    )
    assert told_briefly([Refusal(f"h.{i}", f"reason {i}") for i in range(4)]).endswith("h.3: reason 3")

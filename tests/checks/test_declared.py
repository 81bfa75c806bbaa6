"""NP104 and NP212: what the configuration states against what was computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import normprobe
from normprobe.checks import find, run
from normprobe.inputs.declared import declared_by
from normprobe.records import BranchScale, Declared, Finding, Head, ReportData, WeightSite
from tests import models
from tests.checks import builders as b

EPS = Declared(path=".", field="rms_norm_eps", fact="eps", stated=1e-5, value=1e-5)


def found(code: str, model: nn.Module, inputs: Any) -> tuple[Finding, ...]:
    return tuple(f for f in normprobe.probe(model, inputs, level="structure").findings if f.code == code)


def judge(code: str, data: ReportData) -> Any:
    return run(data, checks=[find(code)])


def said(value: Any, fact: Any, path: str = ".", field: str = "field") -> Declared:
    return Declared(path=path, field=field, fact=fact, stated=value, value=value)


def granite(**fields: Any) -> models.Built:
    small = models.SMALL | {"num_key_value_heads": 2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    small |= {"attention_multiplier": 0.0625, "logits_scaling": 8.0}
    return models.hugging_face("GraniteForCausalLM", "GraniteConfig", **small, **fields)


def cohere(**fields: Any) -> models.Built:
    small = models.SMALL | {"num_key_value_heads": 2, "use_qk_norm": True}
    return models.hugging_face("CohereForCausalLM", "CohereConfig", **small, **fields)


BUILT = {**models.MODELS, "granite": granite, "cohere": cohere}


@pytest.mark.parametrize("name", BUILT)
def test_sound_models_compute_what_they_declare(name: str) -> None:
    model, inputs = BUILT[name]()
    assert found("NP104", model, inputs) == found("NP212", model, inputs) == ()


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama", "rms_norm_eps", 1e-5),
        ("gpt2", "layer_norm_epsilon", 1e-6),
        ("bert", "layer_norm_eps", 1e-5),
        ("t5", "layer_norm_epsilon", 1e-5),
        ("qwen3", "rms_norm_eps", 1e-3),
    ],
)
def test_np104_finds_another_eps_than_declared(name: str, field: str, value: float) -> None:
    model, inputs = BUILT[name]()
    was = getattr(model.config, field)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), field):
            setattr(module.config, field, value)
    (finding, *more) = found("NP104", model, inputs)
    assert finding.severity.value == "warning"
    assert finding.value == pytest.approx(was, rel=0.01)
    assert finding.limit == value
    assert f"{field} = {value}" in finding.message
    assert len(more) <= 1  # an encoder and a decoder have one each


def test_np104_speaks_where_no_norm_of_the_stream_agrees() -> None:
    off = b.norm("blocks.0.norm", eps=1e-6)
    assert judge("NP104", b.document(norms=(off, b.norm("norm", role="final")), declared=(EPS,))) == ((), ())
    (finding,), _ = judge("NP104", b.document(norms=(off, b.norm("norm", role="final", eps=1e-6)), declared=(EPS,)))
    assert finding.places == ("blocks.0.norm", "norm")
    assert (
        finding.message == "eps 1e-06 in all 2 norms on the stream, where the configuration says rms_norm_eps = 1e-05"
    )


def test_np104_takes_a_norm_of_the_readout_for_what_the_field_is_for() -> None:
    """ConvNeXt's field is for the norm behind its pooling."""
    off, own = b.norm("stages.1.norm", eps=1e-6), EPS.model_copy(update={"own": ("stages.1.norm",)})
    readout = off, b.norm("norm", role="head")
    assert judge("NP104", b.document(norms=readout, declared=(own,))) == ((), ())
    for norms, declared, severity in (
        (readout, EPS, "warning"),  # its class hands the field on
        ((off, b.norm("norm", role="query")), own, "note"),
        ((off, b.norm("norm", role="head", eps=1e-6)), own, "note"),
    ):
        (finding,), _ = judge("NP104", b.document(norms=norms, declared=(declared,)))
        assert finding.severity.value == severity


def test_np104_notes_what_the_class_builds_so() -> None:
    norms = b.norm("blocks.0.norm", eps=1e-6), b.norm("norm", role="final", eps=1e-6)
    for own, severity in ((("blocks.0.norm", "norm", "other"), "note"), (("norm",), "warning")):
        (finding,), _ = judge("NP104", b.document(norms=norms, declared=(EPS.model_copy(update={"own": own}),)))
        assert finding.severity.value == severity
        assert ("the model's own class does not hand on" in finding.message) is (severity == "note")


def test_np104_on_a_backbone_without_the_norm_that_reads_the_field() -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"depths": [1, 2, 3, 1], "hidden_sizes": [8, 16, 24, 32], "out_features": ["stage2", "stage4"]}
    model = transformers.ConvNextBackbone(transformers.ConvNextConfig(**sizes)).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 64, 64)}
    (finding,) = found("NP104", model, inputs)
    assert (finding.severity.value, len(finding.places)) == ("note", 4)
    for norm in model.hidden_states_norms.values():
        norm.eps = 1e-3
    assert found("NP104", model, inputs)[0].severity.value == "warning"


@pytest.mark.parametrize(("eps", "silent"), [(1.049e-5, True), (1.051e-5, False), (0.951e-5, True), (0.949e-5, False)])
def test_np104_stands_at_its_limit(eps: float, silent: bool) -> None:
    finding, _ = judge("NP104", b.document(norms=(b.norm(eps=eps),), declared=(EPS,)))
    assert (finding == ()) is silent


@pytest.mark.parametrize(
    "norm",
    [
        b.norm(eps=1e-6, role="query"),
        b.norm(eps=1e-6, role="embedding"),
        b.norm(eps=1e-6, executed=False),
        b.norm(eps=1e-6, kind="l2norm"),
        b.norm(eps=1e-6, module=False),
    ],
)
def test_np104_judges_norms_on_streams_alone(norm: Any) -> None:
    assert judge("NP104", b.document(norms=(norm,), declared=(EPS,))) == ((), ())


def test_np104_goes_by_the_nearest_configuration_and_by_any_of_its_numbers() -> None:
    inner = said(1e-6, "eps", path="vision", field="layer_norm_eps")
    norms = (b.norm("vision.norm", eps=1e-6), b.norm("text.norm", eps=1e-5))
    assert judge("NP104", b.document(norms=norms, declared=(EPS, inner))) == ((), ())
    (finding,), _ = judge("NP104", b.document(norms=norms, declared=(EPS, said(1e-3, "eps", path="vision"))))
    assert finding.where == "vision.norm"
    both = (EPS, said(1e-6, "eps", field="layer_norm_eps"))
    assert judge("NP104", b.document(norms=(b.norm(eps=1e-6),), declared=both)) == ((), ())


def test_np104_says_what_it_could_not_compare() -> None:
    (none,), _ = judge("NP104", b.document(norms=(b.norm(eps=None, eps_placement="none"),), declared=(EPS,)))
    assert (none.value, none.message.startswith("no eps in all 1 norms on the stream")) == (0.0, True)
    finding, (skipped,) = judge("NP104", b.document(norms=(b.norm(eps=None),), declared=(EPS,)))
    assert (finding, skipped.why) == ((), "eps could not be told")
    assert judge("NP104", b.document(declared=())) == judge("NP212", b.document(declared=())) == ((), ())


def declare(model: nn.Module, **fields: Any) -> None:
    for module in model.modules():
        if hasattr(module, "config"):
            for name, value in fields.items():
                setattr(module.config, name, value)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("llama", {"attn_logit_softcapping": 50.0}, "2 attention sites cap no logits"),
        ("llama", {"final_logit_softcapping": 30.0}, "the logits are not capped"),
        ("gemma2", {"attn_logit_softcapping": 20.0}, "logits are capped at 50.0"),
        ("gemma2", {"query_pre_attn_scalar": 64}, "q·kᵀ is multiplied by 0.25"),
        ("granite", {"embedding_multiplier": 6.0}, "embeddings enter the stream multiplied by 12"),
        ("llama", {"embedding_multiplier": 6.0}, "embeddings enter the stream multiplied by 1"),
        ("granite", {"residual_multiplier": 0.5}, "branches are added multiplied by 0.22"),
        ("qwen3", {"residual_multiplier": 0.5}, "branches are added multiplied by 1"),
        ("granite", {"attention_multiplier": 1.0}, "q·kᵀ is multiplied by 0.0625"),
        ("llama", {"logits_scaling": 4.0}, "logits are multiplied by 1"),
        ("llama", {"logit_scale": 0.5}, "logits are multiplied by 1"),
        ("llama", {"use_qk_norm": True}, "no query or key is normed"),
        ("gpt2", {"qk_layernorm": True}, "no query or key is normed"),
        ("neox_parallel", {"use_parallel_residual": False}, "all branches run side by side"),
        ("neox_sequential", {"use_parallel_residual": True}, "branches run one after the other"),
        ("opt_post", {"do_layer_norm_before": True}, "norms sit on the sums"),
        ("opt_pre", {"do_layer_norm_before": False}, "norms sit before branches"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "norms sit before branches"),
        ("llama", {"sliding_window": 4}, "every query sees all earlier keys, 8 at most"),
        ("llama", {"tie_word_embeddings": True}, "lm_head.weight and model.embed_tokens.weight are two tensors"),
    ],
)
def test_np212_finds_what_the_data_flow_lacks(name: str, fields: dict[str, Any], words: str) -> None:
    model, inputs = BUILT[name]()
    declare(model, **fields)
    (finding,) = found("NP212", model, inputs)
    assert finding.severity.value == "warning"
    assert words in finding.message
    assert f"the configuration says {next(iter(fields))} = {next(iter(fields.values()))}, and " in finding.message
    assert finding.source == f"{next(iter(fields))} of the configuration"


@pytest.mark.parametrize("name", ["gpt2", "bert", "qwen3"])
def test_np212_finds_a_head_that_was_copied(name: str) -> None:
    model, inputs = BUILT[name]()
    declare(model, tie_word_embeddings=True)
    head = model.get_output_embeddings()
    copied = nn.Linear(models.WIDTH, models.VOCABULARY, bias=False)
    copied.load_state_dict({"weight": head.weight.detach().clone()})
    model.set_output_embeddings(copied)
    (finding,) = found("NP212", model, inputs)
    assert "are two tensors" in finding.message


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 4, "use_sliding_window": False},
        {"sliding_window": 4, "layer_types": ["full_attention"] * 2},
        {"sliding_window": None, "attn_logit_softcapping": None, "final_logit_softcapping": 0.0},
        {"use_qk_norm": False, "tie_word_embeddings": False, "parallel_attn": False},
        {"logit_scale": "inv_sqrt_d_model", "logits_scaling": float("nan")},
    ],
)
def test_np212_takes_no_field_for_a_statement_that_is_none(fields: dict[str, Any]) -> None:
    model, inputs = models.llama()
    for name, value in fields.items():
        object.__setattr__(model.config, name, value)
    assert found("NP212", model, inputs) == ()


def test_np212_says_that_the_input_is_shorter_than_the_window() -> None:
    model, inputs = models.llama()
    declare(model, sliding_window=4096)
    report = normprobe.probe(model, inputs, level="structure")
    (skipped,) = [s for s in report.skipped if s.what.startswith("NP212")]
    assert skipped.why == "sliding_window: the recorded input has 8 keys, no more than the window of 4096"


@pytest.mark.parametrize(
    ("facts", "declared", "why"),
    [
        ({"attention": (b.site(scale=None),)}, said(0.5, "attention_scale"), "the factor on q·kᵀ is not constant"),
        ({"attention": (b.site(),)}, said(True, "qk_norm"), "could not be followed to their weights"),
        ({"head": Head(path="head.weight", logit_multiplier=None)}, said(0.5, "logit_multiplier"), "is not constant"),
    ],
)
def test_np212_skips_what_could_not_be_read(facts: dict[str, Any], declared: Declared, why: str) -> None:
    data = b.document(declared=(declared,))
    finding, (skipped,) = judge("NP212", data.model_copy(update={"anatomy": data.anatomy.model_copy(update=facts)}))
    assert finding == ()
    assert why in skipped.why


@pytest.mark.parametrize(
    ("facts", "declared"),
    [
        ({"attention": (b.site(kernel="flash::forward"),)}, said(50.0, "attention_softcap")),
        ({"attention": (b.site(cross=True),)}, said(50.0, "attention_softcap")),
        ({"streams": (b.stream(input_multiplier=3.0),)}, said(2.0, "input_multiplier")),  # it begins with a sum
        (
            {"streams": (b.stream(branches=(b.branch("blocks.0", branch_scale=BranchScale(kind="scalar")),)),)},
            said(0.5, "branch_multiplier"),
        ),
        ({"streams": (b.stream(topology="gated"),)}, said(True, "parallel")),
        (
            {"streams": (b.stream(branches=(b.branch("blocks.0"), b.branch("blocks.1", placement="output"))),)},
            said(False, "pre_norm"),
        ),
        ({"streams": (b.stream(branches=(b.branch("blocks.0", kind="conv"),)),)}, said(False, "pre_norm")),
        ({"head": None}, said(30.0, "logit_softcap")),
        ({"head": Head(path="head.weight", tied_to="embedding.weight")}, said(True, "tied")),
        ({"head": Head(path="other.weight")}, said(30.0, "logit_softcap", path="text")),
    ],
)
def test_np212_claims_nothing_that_the_flow_does_not_show(facts: dict[str, Any], declared: Declared) -> None:
    data = b.document(declared=(declared,))
    assert judge("NP212", data.model_copy(update={"anatomy": data.anatomy.model_copy(update=facts)})) == ((), ())


@pytest.mark.parametrize(("cap", "silent"), [(30.0, True), (50.0, False), (None, False)])
def test_np212_compares_the_cap_of_the_logits(cap: float | None, silent: bool) -> None:
    data = b.document(declared=(said(30.0, "logit_softcap"),))
    capped = data.anatomy.model_copy(update={"head": Head(path="head.weight", softcap=cap)})
    finding, _ = judge("NP212", data.model_copy(update={"anatomy": capped}))
    assert [f.value for f in finding] == ([] if silent else [cap])


def table(name: str, role: Any, shape: tuple[int, int] = (64, 8)) -> WeightSite:
    kind: Any = "embedding" if role == "embedding" else "linear"
    facts: Any = {"fan_in": 1, "fan_out": 8, "output_axis": 1, "kind": kind, "operand": 0, "site": b.branch("x").add}
    return WeightSite(parameter=name, roles=(role,), shape=shape, **facts)


@pytest.mark.parametrize(
    ("tables", "source", "tells"),
    [
        ([table("words", "embedding")], None, True),
        ([table("words", "embedding", (32, 8))], None, False),
        ([table("words", "embedding"), table("places", "embedding")], None, True),
        ([table("words", "embedding"), table("head.weight", "embedding")], None, False),
        ([table("words", "embedding"), table("places", "embedding")], "words", True),
        ([], None, False),
    ],
)
def test_np212_knows_the_table_that_the_head_would_be_tied_to(
    tables: list[WeightSite], source: str | None, tells: bool
) -> None:
    data = b.document(declared=(said(True, "tied"),), streams=(b.stream(source=source),))
    weights = (table("head.weight", "head"), *tables)
    data = data.model_copy(update={"anatomy": data.anatomy.model_copy(update={"weights": weights})})
    assert len(judge("NP212", data)[0]) == tells
    assert judge("NP212", data.model_copy(update={"declared": (said(False, "tied"),)})) == ((), ())
    head = Head(path="head.weight", tied_to="words")
    tied = data.anatomy.model_copy(update={"head": head})
    assert judge("NP212", data.model_copy(update={"anatomy": tied})) == ((), ())


def test_np212_stands_at_its_limit_and_lets_nothing_broken_pass() -> None:
    def scaled(value: float) -> ReportData:
        return b.document(attention=(b.site(scale=value),), declared=(said(0.5, "attention_scale"),))

    assert judge("NP212", scaled(0.5049)) == ((), ())
    assert len(judge("NP212", scaled(0.506))[0]) == len(judge("NP212", scaled(0.494))[0]) == 1
    assert len(judge("NP212", scaled(float("nan")))[0]) == 1


class Composite(nn.Module):
    """Two parts with configurations of their own in a whole with another, as multimodal models are."""

    def __init__(self) -> None:
        super().__init__()
        text = SimpleNamespace(rms_norm_eps=1e-6, final_logit_softcapping=30.0, tie_word_embeddings=True, to_dict=dict)
        self.config = SimpleNamespace(text_config=text, tie_word_embeddings=False, to_dict=dict)
        self.text, self.vision = nn.Module(), nn.Module()
        self.text.config = text
        self.text.layer = nn.Module()
        self.text.layer.config = text
        self.vision.config = {"layer_norm_eps": 1e-5, "qk_norm": "yes", "sliding_window": -1.0, "eps": 1.0}


def test_declarations_are_told_once_with_the_module_that_holds_them() -> None:
    told = [(d.path, d.field, d.value) for d in declared_by(Composite())]
    assert told == [
        (".", "tie_word_embeddings", False),
        (".", "text_config.final_logit_softcapping", 30.0),
        ("text", "rms_norm_eps", 1e-6),
        ("text", "final_logit_softcapping", 30.0),
        ("text", "tie_word_embeddings", True),
        ("vision", "layer_norm_eps", 1e-5),
    ]


def test_declarations_go_to_json_and_back() -> None:
    model, _ = models.gemma2()
    data = ReportData(declared=declared_by(model))
    assert {d.fact for d in data.declared} >= {"eps", "attention_softcap", "attention_scale", "logit_softcap", "tied"}
    assert ReportData.model_validate_json(data.model_dump_json()) == data
    assert declared_by(nn.Linear(2, 2)) == ()


@pytest.mark.parametrize("labels", [2, 3])
def test_np212_takes_a_classifier_of_the_shape_of_a_small_table_for_no_tied_head(labels: int) -> None:
    """BERT states that its embeddings are tied; its classifiers of two labels have the shape of the token types'."""
    transformers = pytest.importorskip("transformers")
    from tests.models import SMALL, ids

    config = transformers.BertConfig(**SMALL, num_labels=labels)
    model = transformers.BertForSequenceClassification(config).eval()
    report = normprobe.probe(model, {"input_ids": ids()})
    assert not [finding for finding in report.findings if finding.code == "NP212"]

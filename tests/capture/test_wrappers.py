"""Forwards wrapped for a while: every way of calling is seen, everything is put back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normprobe.capture.wrappers import wrapped_forwards


class Log:
    """Notes the path of every call, and passes it on."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def __call__(self, path, module, forward, args, kwargs):
        self.paths.append(path)
        return forward(*args, **kwargs)


def tower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))


def test_every_run_goes_through_the_wrapper_outermost_first() -> None:
    model, log = tower(), Log()
    with wrapped_forwards(model, log):
        model(torch.ones(1, 2))
    assert log.paths == [".", "0", "1", "1.0", "1.1"]


def test_direct_call_of_a_forward_is_seen() -> None:
    model, log = tower(), Log()
    with wrapped_forwards(model, log):
        model[1].forward(torch.ones(1, 2))
    assert log.paths == ["1", "1.0", "1.1"]


def test_hooks_still_run() -> None:
    model, log, seen = tower(), Log(), []
    model[0].register_forward_hook(lambda m, args, out: seen.append(out.shape))
    with wrapped_forwards(model, log):
        model(torch.ones(1, 2))
    assert seen == [(1, 2)]


def test_shared_module_is_wrapped_once() -> None:
    shared, log = nn.ReLU(), Log()
    model = nn.Sequential(shared, shared)
    with wrapped_forwards(model, log):
        model(torch.ones(1, 2))
    assert log.paths == [".", "0", "0"]


def test_arguments_and_result_pass_through() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, by: float, also: dict[str, float]) -> tuple[Tensor, float]:
            return x * by, also["k"]

    model = Scaled()
    with wrapped_forwards(model, Log()):
        result = model(torch.ones(2), by=3.0, also={"k": 4.0})
    assert torch.equal(result[0], torch.full((2,), 3.0))
    assert result[1] == 4.0


def test_signature_of_a_wrapped_forward_is_kept() -> None:
    import inspect

    model = nn.MultiheadAttention(2, 1)
    plain = inspect.signature(model.forward)
    with wrapped_forwards(model, Log()):
        assert inspect.signature(model.forward) == plain


@pytest.mark.parametrize("raises", [True, False])
def test_class_forwards_and_instance_forwards_come_back(raises: bool) -> None:
    model = tower()
    own = model[0].__dict__["forward"] = lambda x: x * 2
    try:
        with wrapped_forwards(model, Log()):
            assert model[0].__dict__["forward"] is not own
            assert torch.equal(model[0](torch.ones(1, 2)), torch.full((1, 2), 2.0))
            if raises:
                raise KeyError
    except KeyError:
        assert raises
    assert model[0].__dict__["forward"] is own
    assert [n for n, m in model.named_modules() if "forward" in m.__dict__] == ["0"]


def test_error_passes_through() -> None:
    model = tower()
    with pytest.raises(RuntimeError, match="mat1 and mat2"), wrapped_forwards(model, Log()):
        model(torch.ones(1, 5))
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_script_modules_are_left_alone() -> None:
    class Traced(torch.jit.ScriptModule):
        pass

    model, log = nn.Sequential(nn.ReLU(), Traced()), Log()
    with wrapped_forwards(model, log):
        model[0](torch.ones(1))
    assert log.paths == ["0"]

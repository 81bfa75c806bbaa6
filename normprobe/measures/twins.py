"""Whether outputs of a weight that hold the same numbers get the same gradient."""

from __future__ import annotations

from torch import Tensor, nn

from normprobe.measures.equal_outputs import alike
from normprobe.records import Anatomy
from normprobe.records.init import Initialisation


class Twins:
    """The weights with outputs that are the same, while gradients come in."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, init: Initialisation | None) -> None:
        weights = () if init is None else init.weights
        wanted = {w.parameter for w in weights if w.repeated or w.same_outputs}
        named = dict(model.named_parameters()) if wanted else {}
        sites = [site for site in anatomy.weights if site.parameter in wanted]
        self._sites = {site.parameter: (site, named[site.parameter]) for site in sites}
        self._init = init
        self._alike: dict[str, int | None] = {}

    def seen(self, name: str, gradient: Tensor) -> None:
        """Compare what the equal outputs of the weight `name` get."""
        if name in self._sites:
            site, parameter = self._sites[name]
            self._alike[name] = alike(parameter.detach(), gradient, site)

    def record(self) -> Initialisation | None:
        """How the weights were drawn, with what was seen."""
        if self._init is None or not self._alike:
            return self._init
        weights = tuple(w.model_copy(update={"alike": self._alike.get(w.parameter)}) for w in self._init.weights)
        return self._init.model_copy(update={"weights": weights})

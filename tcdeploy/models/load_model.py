"""Loads a model with its weights: threads read those that are traced, transformers loads others, or they are random."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers import PreTrainedConfig, PreTrainedModel

from tcdeploy.models.convert.convert_model import convert_model
from tcdeploy.models.convert.quantised_weights import loading_refusal
from tcdeploy.models.dummy_model import dummy_model
from tcdeploy.models.formats.methods import is_quantised
from tcdeploy.models.load import quiet_transformers, translating_errors
from tcdeploy.models.pretrained import pretrained_model
from tcdeploy.models.traced_model import LoadingModel, TracedModel
from tcdeploy.planning.plan import Plan


@contextlib.contextmanager
def loading_model(traced: TracedModel, plan: Plan) -> Iterator[LoadingModel]:
    """The model on the plan's device. Threads read its weights during the block; they are complete after it.

    ModelError and SpaceError are raised on entry or exit. Errors of the block itself are not translated.
    """
    with contextlib.ExitStack() as reading:
        with translating_errors(plan.model):
            loading = reading.enter_context(traced.loading(plan.device))
        yield loading
        with translating_errors(plan.model):
            reading.close()


def load_model(
    plan: Plan, config: PreTrainedConfig, attn_implementation: str, packed_linears: tuple[tuple[str, ...], ...],
    traced: TracedModel | None = None,
) -> PreTrainedModel:  # fmt: skip
    """The model in eval mode, on the plan's device and in its weight_dtype, with its linear layers packed.

    traced: the same model, if its weights are traced. Raises ModelError, NetworkError, SpaceError.
    """
    if traced is not None:
        with loading_model(traced, plan) as loading:
            pass
        return loading.model
    with quiet_transformers(), translating_errors(plan.model):
        if plan.load_format == "dummy":
            model = dummy_model(plan, config, attn_implementation)
        elif is_quantised(config):
            raise loading_refusal(plan.model, config, "they are not traced")
        else:
            model = pretrained_model(plan, config, attn_implementation)
    return convert_model(model, packed_linears)

"""`LLM`: load a model in this process, and answer batches of prompts.

It adds text to the engine: the tokenizer, the chat template, stop strings and the model's defaults. All of its work is
done in the thread that calls it. `AsyncLLM` (async_llm.py) streams, and runs requests that arrive at any time.

Rejected: n answers per prompt, which would make each result a list of lists. Pass a prompt n times; copies that start
in a later step take its tokens from the prefix cache. Also rejected: tool calls and reasoning as parts of an answer,
which depend on the API's protocol (server/output/).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Self, cast, overload

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import UsageError
from tcdeploy.host.progress import Progress
from tcdeploy.llm.batch import naming, run_batch
from tcdeploy.llm.loaded_model import EncodedPrompt, LoadedModel, Message, Prompt, progress_of_start
from tcdeploy.llm.outputs import Answer, AnswerPiece, TextOutput
from tcdeploy.llm.progress_bar import ProgressBar
from tcdeploy.planning.recipe import recipe_of_fields
from tcdeploy.start.prepare import prepare

if TYPE_CHECKING:  # imports torch
    from tcdeploy.engine.engine import Engine
    from tcdeploy.start.deployment import Deployment

Params = SamplingParams | Sequence[SamplingParams] | None  # one for all prompts, or one per prompt


class LLM:
    """A model that is loaded and compiled in this process, for batches of prompts.

        with LLM("Qwen/Qwen3-8B", context=8192) as llm:
            [answer] = llm.generate("Once upon a time", SamplingParams(max_tokens=64))
            print(answer.text)

    model: Hub id, local folder, or builtin:tiny, which is embedded in the package.
    progress: receives the stages of the start. True: they are printed if stderr is a terminal; False: they are not.
    fields: fields of `Recipe`, such as `context`, `dtype`, `buckets`, `batch_sizes` or `cache_dir`.

    The start is that of `prepare`, whose docstring lists what it changes in the process. Raises TcdeployError. `close`,
    or the end of a `with` block, frees the memory. Calls from several threads run one after another.
    """

    def __init__(self, model: str, *, progress: Progress | bool = True, **fields: Any) -> None:
        recipe = recipe_of_fields({"model": model, **fields}, "LLM")
        deployment = prepare(recipe, progress_of_start(progress), needs_tokenizer=True)
        self._model: LoadedModel | None = LoadedModel(deployment)
        self._lock = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        progress: bool = True,
    ) -> list[Answer]:
        """The answer to each prompt, in order: a list, also for one prompt.

        prompts: a text, a list of token ids, or a list of these.
        params: one for all prompts, or a list with one per prompt. None: the model's defaults (`default_params`), whose
            length is cut to what the context leaves. The model's end-of-sequence ids end an answer with any
            parameters, unless these set `ignore_eos`.
        progress: show a progress bar on stderr, if it is a terminal and the batch takes more than 2 s.

        Raises UsageError, which names the prompt, if one cannot be served, and generates nothing then. Ctrl-C aborts
        the open requests, and the LLM can be used further.
        """
        with self._lock:
            encoded = _encode_all("prompt", _prompt_list(prompts), self._loaded.encode)
            return self._run(encoded, params, progress)

    @overload
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *,
        chat_template_kwargs: Mapping[str, Any] | None = None, progress: bool = True,
    ) -> Answer: ...  # fmt: skip

    @overload
    def chat(
        self, messages: Sequence[Sequence[Message]], params: Params = None, *,
        chat_template_kwargs: Mapping[str, Any] | None = None, progress: bool = True,
    ) -> list[Answer]: ...  # fmt: skip

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: Params = None, *,
        chat_template_kwargs: Mapping[str, Any] | None = None, progress: bool = True,
    ) -> Answer | list[Answer]:  # fmt: skip
        """The answer to a conversation, or a list of answers to a list of conversations.

        messages: dicts as in OpenAI's API, with `role` and a text as `content`.
        chat_template_kwargs: further variables of the model's chat template, such as {"enable_thinking": False}.

        The other arguments and the errors are those of `generate`. The text of the answer is all that the model
        generates, reasoning and tool calls included.
        """
        if not isinstance(messages, list | tuple):
            problem = f"messages is {messages!r:.80}; it must be a list of messages, or a list of such lists"
            raise UsageError(problem, 'chat([{"role": "user", "content": "Hello"}])')
        conversations = cast("Sequence[Sequence[Message]]", messages)
        if is_single := not messages or isinstance(messages[0], Mapping):
            conversations = [cast("Sequence[Message]", messages)]
        with self._lock:
            encode = functools.partial(self._loaded.encode_chat, variables=chat_template_kwargs or {})
            encoded = _encode_all("conversation", conversations, encode)
            answers = self._run(encoded, params, progress)
        return answers[0] if is_single else answers

    def _run(self, prompts: list[EncodedPrompt], params: Params, progress: bool) -> list[Answer]:
        model = self._loaded
        requests = map(model.request, prompts, _params_list(params, len(prompts)))
        outputs = [TextOutput(model.tokenizer, request) for request in requests]
        with closing(ProgressBar(len(outputs), progress)) as bar:

            def count(_: int, piece: AnswerPiece) -> None:
                bar.add(len(piece.token_ids), bool(piece.finish_reason))

            run_batch(model.deployment.engine, outputs, count)
        return [output.answer() for output in outputs]

    @property
    def default_params(self) -> SamplingParams:
        """The model's sampling defaults. To change some: `dataclasses.replace(llm.default_params, max_tokens=50)`."""
        return self._loaded.default_params

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer, or a StoredTokenizer after a start from packages."""
        return self._loaded.tokenizer

    @property
    def deployment(self) -> Deployment:
        """What `prepare` returned: the plan, the seconds of the stages, and the results of the warm-up."""
        return self._loaded.deployment

    @property
    def engine(self) -> Engine:
        """For a loop of your own (`submit`, `step`, `abort`). Complete its requests before you call `generate`."""
        return self._loaded.deployment.engine

    def close(self) -> None:
        """Free the memory of the model, its KV cache and its programs. The LLM cannot be used any more.

        References to `engine` or `deployment` keep their memory.
        """
        if self._model is not None:
            from tcdeploy.start.deployment import release_memory  # imports torch, which is loaded by now

            with self._lock:
                self._model = None
            release_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _loaded(self) -> LoadedModel:
        if self._model is None:
            raise UsageError("this LLM is closed", "create another one")
        return self._model


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if not isinstance(prompts, Sequence):
        problem = f"prompts is {prompts!r:.80}; it must be a text, a list of token ids, or a list of these"
        raise UsageError(problem, 'generate(["Once upon a time"])')
    if isinstance(prompts, str) or (prompts and all(isinstance(item, int) for item in prompts)):
        return [cast("Prompt", prompts)]
    return cast("Sequence[Prompt]", prompts)


def _encode_all(noun: str, items: Sequence[Any], encode: Callable[[Any], EncodedPrompt]) -> list[EncodedPrompt]:
    """The token ids of each item. An error names the item, if there are several."""
    encoded = []
    for number, item in enumerate(items):
        with naming(f"{noun} {number}: " if len(items) > 1 else ""):
            encoded.append(encode(item))
    return encoded


def _params_list(params: Params, num_prompts: int) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, list | tuple):
        problem = f"params is {params!r:.80}; it must be a SamplingParams, or a list with one per prompt"
        raise UsageError(problem, "SamplingParams(max_tokens=64)")
    if len(params) != num_prompts:
        problem = f"there are {len(params)} sampling parameters for {num_prompts} prompts"
        raise UsageError(problem, "pass one SamplingParams for all prompts, or one per prompt")
    for item in params:
        if item is not None and not isinstance(item, SamplingParams):
            raise UsageError(f"params has {item!r:.80}; it must be a SamplingParams", "SamplingParams(max_tokens=64)")
    return params

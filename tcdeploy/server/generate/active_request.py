"""An admitted request, from submission to the engine until its last token or its cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from tcdeploy.engine.schedule.constraint import Constraint
from tcdeploy.engine.schedule.sequence import NewToken, SamplingParams
from tcdeploy.engine.thread.engine_thread import EngineRequest
from tcdeploy.engine.thread.request_group import RequestGroup
from tcdeploy.server.apis.openai.protocol import ChatRequest, CompletionRequest, bad_request
from tcdeploy.server.apis.openai.validation import check_prompt_logprobs, params_of_choices, to_sampling_params
from tcdeploy.server.generate.choice import Choice, Delta, Usage, total_usage
from tcdeploy.server.generate.tokenization import Prompt
from tcdeploy.server.observe.metrics import Stopwatch
from tcdeploy.server.observe.request_log import LoggedGeneration
from tcdeploy.server.output.tools import SelectedParser
from tcdeploy.server.service import Service
from tcdeploy.text.stop_strings import StopStringDetokenizer

# Prompts or choices that are set up between two yields to the event loop. All ready requests run in one turn of the
# loop, so slices are short: a prompt with 512 logit biases takes 0.8 ms, and a choice with tools parses their template.
PROMPTS_PER_SLICE = CHOICES_PER_SLICE = 2
GRAMMAR_ERROR_MESSAGE = (
    "the output cannot follow its schema or grammar, which exceeded a limit of work or memory; use a simpler one"
)


class ActiveRequest:
    """The engine requests and choices of one API request. Choice i * n + j is the j-th choice of prompt i, with n =
    `request.num_choices`. `submit` fills `choices`. `close` must be called once.
    """

    def __init__(
        self,
        service: Service,
        request: CompletionRequest | ChatRequest,
        prompts: list[Prompt],
        params: list[SamplingParams],  # one per choice
    ) -> None:
        self.service, self.request, self.prompts = service, request, prompts
        self.choices: list[Choice] = []
        self._has_failed = False
        self.stopwatches = [Stopwatch(service.metrics, not request.only_scores_prompt) for _ in params]
        ids_of_choices = [prompt.token_ids for prompt in prompts for _ in range(request.num_choices)]
        self.group = RequestGroup(service.engine_thread, list(zip(ids_of_choices, params, strict=True)))

    @classmethod
    async def create(
        cls, service: Service, request: CompletionRequest | ChatRequest, prompts: list[Prompt],
        constraint: Constraint | None = None,
    ) -> ActiveRequest:  # fmt: skip
        """Build the sampling parameters of each choice, without blocking the event loop. Raises ApiError 400. The
        choices of a prompt share one object unless the request has a seed.
        """
        check_prompt_logprobs(request, sum(len(prompt.token_ids) for prompt in prompts))
        params: list[SamplingParams] = []
        for number, prompt in enumerate(prompts, 1):
            first = to_sampling_params(request, len(prompt.token_ids), service.limits, constraint)
            params += params_of_choices(first, request.num_choices, isinstance(request, ChatRequest))
            if number % PROMPTS_PER_SLICE == 0:
                await asyncio.sleep(0)
        return cls(service, request, prompts, params)

    async def submit(self) -> None:
        """Submit to the engine, then create the choices and count the prompt, while the first step runs."""
        await self.group.start()
        request, service = self.request, self.service
        for index in range(len(self.stopwatches)):
            self.choices.append(self._new_choice(index, self.prompts[index // request.num_choices]))
            if len(self.choices) % CHOICES_PER_SLICE == 0:
                await asyncio.sleep(0)
        prompt_lengths = [len(prompt.token_ids) for prompt in self.prompts]
        for length in prompt_lengths:
            service.missed_shapes.observe_shape("prefill", length)
        service.missed_shapes.observe_shape("decode", service.admission.num_admitted)
        max_tokens = (engine_request.params.max_tokens for engine_request in self.group.engine_requests)
        service.metrics.observe_request(prompt_lengths, max_tokens, request.num_choices)

    def _new_choice(self, index: int, prompt: Prompt) -> Choice:
        request, tokenizer = self.request, self.service.prompt_tokenizer.tokenizer
        echo = prompt.text if isinstance(request, CompletionRequest) and request.echo else None
        returns_token_ids = request.return_token_ids is True
        # A chat's response contains the log-probabilities of its prompt once, and not in each choice.
        num_prompt_logprobs = None if isinstance(request, ChatRequest) and index else request.prompt_logprobs
        needs_prompt_token_ids = returns_token_ids or echo is not None or num_prompt_logprobs is not None
        selected = SelectedParser(None)
        if isinstance(request, ChatRequest):
            selected = self.service.tools.output_parser(request, prompt.text or "")
        skips_special_tokens = request.skip_special_tokens is not False
        hidden_ids: frozenset[int] = frozenset()
        if selected.parser is not None and skips_special_tokens and selected.shown_delimiters is not None:
            hidden_ids = self.service.tools.hidden_token_ids(selected.shown_delimiters)
        detokenizer = StopStringDetokenizer(
            tokenizer, request.stop_strings, skips_special_tokens and selected.parser is None, hidden_ids
        )
        return Choice(
            index=index, detokenizer=detokenizer, output_parser=selected.parser,
            num_prompt_tokens=len(prompt.token_ids), num_top_logprobs=request.num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs, echo=echo, drops_output=request.only_scores_prompt,
            returns_token_ids=returns_token_ids,
            prompt_token_ids=tuple(prompt.token_ids) if needs_prompt_token_ids else (),
        )  # fmt: skip

    async def deltas(self, timeout_s: float | None = None) -> AsyncGenerator[dict[int, Delta], None]:
        """Yield new output by choice index; an empty dict if nothing arrived for `timeout_s` seconds. A first token is
        sent to the client before it is counted in the metrics.
        """
        try:
            async with contextlib.aclosing(self.group.tokens(timeout_s)) as batches:
                async for tokens in batches:
                    deltas: dict[int, Delta] = {}
                    received: list[tuple[EngineRequest, NewToken, bool]] = []
                    now = time.perf_counter()
                    try:
                        for engine_request, token in tokens:
                            if engine_request.is_open:
                                self._add_token(engine_request, token, deltas.setdefault(engine_request.index, Delta()))
                                received.append((engine_request, token, not engine_request.is_open))
                        yield deltas
                        if any(token.queue_seconds is not None for _, token, _ in received):
                            await asyncio.sleep(0)  # the loop flushes the socket before it resumes this task
                    finally:
                        for engine_request, token, is_last in received:
                            self._count_token(engine_request, token, is_last, now)
        except Exception:
            self._has_failed = True
            raise

    def _add_token(self, engine_request: EngineRequest, token: NewToken, delta: Delta) -> None:
        """Add the output of a token to `delta`. Closes `engine_request` at the end of the choice."""
        choice, metrics = self.choices[engine_request.index], self.service.metrics
        if token.finish_reason == "error":
            raise bad_request(GRAMMAR_ERROR_MESSAGE, self.request.constraint_field)
        choice.receive(token, self.service.vocabulary, delta)
        if choice.finish_reason:
            metrics.observe_end(choice.finish_reason, choice.num_tokens)
            metrics.broken_tool_calls.inc(choice.output_parser is not None and choice.output_parser.num_malformed > 0)
            if not token.finish_reason:  # a stop string ended the choice; the engine would generate on
                self.group.cancel(engine_request)
            engine_request.is_open = False

    def _count_token(self, engine_request: EngineRequest, token: NewToken, is_last: bool, now: float) -> None:
        """Count a token in the metrics. `now`: when it arrived, in seconds of time.perf_counter."""
        is_first = token.queue_seconds is not None
        if is_first and engine_request.params.prompt_logprobs is None:  # else the cache was not looked up
            self.service.metrics.observe_prefix_cache(len(engine_request.prompt), token.cached_tokens)
        self.stopwatches[engine_request.index].observe_token(now, is_last, token.queue_seconds)

    def close(self) -> None:
        """Cancel what is still open, and release the admitted choices."""
        for engine_request in self.group.engine_requests:
            if engine_request.is_open:
                index = engine_request.index
                num_tokens = self.choices[index].num_tokens if index < len(self.choices) else 0
                self.service.metrics.observe_end("error" if self._has_failed else "abort", num_tokens)
        self.group.close()
        self.service.admission.release(len(self.stopwatches))

    def logged_generation(self) -> LoggedGeneration:
        """For the access log and for traces."""
        num_logged, params = self.service.settings.log_prompts, self.group.engine_requests[0].params
        first_times = [watch.first_token_seconds for watch in self.stopwatches if watch.first_token_seconds is not None]
        token_times = [watch.seconds_per_token for watch in self.stopwatches if watch.seconds_per_token is not None]
        return LoggedGeneration(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            finish_reasons=tuple(choice.finish_reason for choice in self.choices),
            cached_tokens=self.usage.cached_tokens if self.choices else 0,
            first_token_seconds=min(first_times, default=None),
            seconds_per_token=sum(token_times) / len(token_times) if token_times else None,
            is_streamed=self.request.stream is True, parameters=vars(params),
            prompts=tuple(self._logged_prompt(prompt, num_logged) for prompt in self.prompts) if num_logged else (),
        )  # fmt: skip

    def _logged_prompt(self, prompt: Prompt, num_chars: int) -> str:
        """The first characters of a prompt. A character is at most four tokens."""
        if prompt.text is not None:
            return prompt.text[:num_chars]
        return str(self.service.prompt_tokenizer.tokenizer.decode(prompt.token_ids[: 4 * num_chars]))[:num_chars]

    @property
    def usage(self) -> Usage:
        return total_usage(self.choices, len(self.prompts))

"""Generates tokens with the warmed programs: continuous batching, one step ahead of the device.

`step` launches the next step, and then reads the tokens of the previous one, so the device does not wait for the host.
A server calls it at `launch_due`, shortly before the device completes the previous step (launch_timer.py). The host
learns the sampled tokens one step late: a sequence that hit a stop token runs one step more, and that token is dropped.

A constraint needs the previous token before it can compute the next mask. If a constrained row decodes, the forward
pass of the next step is launched first, the tokens are read while it runs, and sampling is launched with the masks. The
device waits only if reading and masks take longer than the forward pass. Steps without constraints are not reordered.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from tcdeploy.engine.schedule.blocks import BlockAllocator
from tcdeploy.engine.schedule.constraint import fill_masks
from tcdeploy.engine.schedule.scheduler import Scheduler, SchedulerConfig
from tcdeploy.engine.schedule.sequence import NewToken, SamplingParams, SchedulerOutput, Sequence, check_request
from tcdeploy.engine.schedule.snapshots import SnapshotCache
from tcdeploy.engine.schedule.step_batch import StepBatchBuilder
from tcdeploy.engine.schedule.step_costs import StepClock, StepCosts, StepPredictor
from tcdeploy.engine.step.in_flight import (
    ForwardPass,
    InFlightStep,
    PromptLogprobs,
    record_event,
    row_logprobs,
    to_host,
)
from tcdeploy.engine.step.launch_timer import LaunchLock, LaunchTimer
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.engine.step.step_graphs import StepAbandoned, never
from tcdeploy.engine.warm.timing import measure_step_costs, time_next_size
from tcdeploy.errors import UsageError
from tcdeploy.kernels.sampling.reference import Logprobs
from tcdeploy.programs.stances import fail_on_recompile

live_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Owns the open requests and the KV blocks. Not thread-safe.

    `costs` limit the time of mixed steps. Without them, steps are neither predicted nor timed. If steps are CUDA
    graphs, `launch_lock` is held while one is launched. Other threads may wait for it, so that they do not compete for
    the GIL (thread/request_group.py).
    """

    def __init__(
        self, runner: ModelRunner, costs: StepCosts | None = None,
        save_costs: Callable[[StepCosts], None] = lambda costs: None, measures_costs: bool = False,
    ) -> None:  # fmt: skip
        """`save_costs` is called when all sizes have been captured and timed, if their times are new.

        `measures_costs`: if `costs` is None, `capture_next_graph` measures them before its first capture.
        """
        self.runner = runner
        self.runner.graphs.end_warmup()
        self.plan = plan = runner.plan
        self.launch_lock = LaunchLock()
        # Without a graph of the whole step, a launch is too long to wait for: on a CPU it computes the step.
        self._launch_guard = self.launch_lock if plan.graphs == "step" else contextlib.nullcontext()
        self._timed_sizes: set[int] = set()  # sizes of prefill steps that were timed while idle
        self.save_costs, self._measures_costs = save_costs, measures_costs
        self.clock: StepClock | None = None
        self.launch_timer = LaunchTimer()
        self.allocator = BlockAllocator(
            plan.kv_blocks, plan.block_size, reuses_prefixes=plan.reuses_prefixes,
            snapshots=SnapshotCache(plan.slots, plan.snapshots),
        )  # fmt: skip
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_rows=plan.decode_buckets[-1].size,
                prefill_tokens=plan.prefill_buckets[-1].size,
                max_prefill_sequences=plan.max_prefill_sequences,
                max_consecutive_prefills=plan.max_consecutive_prefills,
                mixed_steps=plan.mixed_steps,
                itl_target_ms=plan.itl_target,
                has_slots=plan.slots > 0,
            ),
            self.allocator,
        )
        self._batches = StepBatchBuilder()
        self.use_costs(costs)
        self.device_wait_seconds = 0.0  # total time that the host waited for the device
        self._requests: dict[int, Sequence] = {}
        self._buffered_tokens: list[NewToken] = []  # not yet returned
        self._next_id = 0
        self._in_flight: InFlightStep | None = None
        live_engines.add(self)

    def use_costs(self, costs: StepCosts | None) -> None:
        """Predict and measure steps with these costs from now on. No step may be in flight."""
        self.clock = StepClock(StepPredictor(costs, self.runner.step_sizes)) if costs else None
        self.scheduler.predictor = self.clock.predictor if self.clock else None
        # A size that an earlier server found slow is timed again, because that timing may have been interrupted.
        self._timed_sizes = set(costs.idle_sizes) - costs.slow_sizes if costs else set()
        self._saved_costs = costs
        self.runner.graphs.skip_sizes(costs.slow_sizes if costs else frozenset())

    @contextlib.contextmanager
    def paused(self, num_blocks: int) -> Iterator[None]:
        """Between two steps, reserve the decode rows, all state slots and `num_blocks` KV blocks for warm-up batches.

        Waits for the step in flight. Open requests return to the queue; afterwards they are computed again, mostly out
        of the prefix cache, or from their first token if the plan reuses no prefixes. Cached prefixes are evicted only
        if too few blocks are free. No request has a slot meanwhile.
        """
        previous, self._in_flight = self._in_flight, None
        self._deliver(previous)
        self.scheduler.requeue_admitted()
        self._empty_rows()
        blocks = self.allocator.allocate(num_blocks)
        self.runner.reserved_blocks = tuple(blocks)
        try:
            yield
        finally:
            self.runner.reserved_blocks = None
            self.allocator.release(blocks)
            self._empty_rows()
            self.launch_timer.step_started(None, None)

    def submit(self, prompt: Iterable[int], params: SamplingParams, group_id: int | None = None) -> int:
        """Queue a request and return its id. Raises UsageError or SpaceError if it can never be served.

        `group_id` is that of the client request that it belongs to. Groups share decode rows fairly (scheduler.py).
        """
        token_ids = list(prompt)
        check_request(token_ids, params, self.vocab_size, self.plan.context, self.allocator)
        self._next_id += 1
        sequence = Sequence(self._next_id, token_ids, len(token_ids), params, group_id)
        self._requests[sequence.request_id] = sequence
        self.scheduler.submit(sequence)
        return sequence.request_id

    def abort(self, request_id: int) -> None:
        """Drop a request: it gives no more tokens. Raises UsageError if no open request has this id."""
        if request_id not in self._requests:
            raise UsageError(f"no open request {request_id}", "it may have finished already")
        self.scheduler.abort(self._requests.pop(request_id))
        self._buffered_tokens = [token for token in self._buffered_tokens if token.request_id != request_id]

    @property
    def num_open_requests(self) -> int:
        """Requests that are neither complete nor aborted."""
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or self.scheduler.has_work or bool(self._buffered_tokens)

    @property
    def launch_due(self) -> float | None:
        """Time at which to call `step`, in seconds of time.perf_counter. None: at once. Earlier calls are allowed."""
        return self.launch_timer.due(self.scheduler.has_prompts)

    def step(self) -> list[NewToken]:
        """Launch one step; returns the new tokens of all requests.

        Raises RecompileError if a step would compile. If the launch raises, all requests return to the queue. If
        reading the previous step's tokens raises (a CUDA error), the engine must not be used any more.
        """
        self._launch_and_collect()
        tokens, self._buffered_tokens = self._buffered_tokens, []
        return tokens

    def capture_next_graph(self, must_stop: Callable[[], bool] = never) -> bool:
        """Capture one more CUDA graph, or time a captured size, while no request is open. False if nothing is left.

        Gives up, and returns True, soon after `must_stop` returns True: a capture before its next program, a timing
        after its present step, and a measurement of costs before one of its next timings. If the capture fails or would
        compile, a warning is logged. Exceptions of a timed step are raised.
        """
        assert not self.has_work and self.runner.row_assignment.is_empty, "the step may run before its capture"
        with fail_on_recompile():
            is_left = self._time_next_size(must_stop) or self.runner.graphs.capture_next(must_stop)
        costs = self.clock.predictor.costs if self.clock else None
        if not is_left and costs and costs != self._saved_costs:
            self._saved_costs = costs
            self.save_costs(costs)
        return is_left

    def _time_next_size(self, must_stop: Callable[[], bool]) -> bool:
        """Time a prefill step of one captured size. False if all are timed."""
        if self.clock is None:
            return self._measures_costs and self._measure_costs(must_stop)
        with self.runner.uncounted_steps():
            costs = time_next_size(
                self.runner, self.clock.predictor.costs, self.allocator, self._timed_sizes, must_stop
            )
        if costs is not None:
            self.clock.predictor.costs = costs
            self.runner.graphs.skip_sizes(costs.slow_sizes)
        return costs is not None

    def _measure_costs(self, must_stop: Callable[[], bool]) -> bool:
        """Measure the costs of steps. Always True: sizes can be timed afterwards."""

        def stop_if_due() -> None:
            if must_stop():
                raise StepAbandoned

        try:
            with self.paused(self.allocator.capacity), self.runner.uncounted_steps():
                costs = measure_step_costs(self.runner, stop_if_due)
        except StepAbandoned:
            return True
        self.use_costs(costs)
        self.save_costs(costs)
        return True

    @property
    def wants_graph(self) -> bool:
        """Whether `capture_wanted_graph` can capture a CUDA graph that would reduce the padding of served steps."""
        return self.runner.graphs.can_capture_wanted

    def capture_wanted_graph(self, must_stop: Callable[[], bool] = never) -> None:
        """Capture the missing CUDA graph that most served steps would have replayed. Requests may be open.

        Waits for the step in flight first. Gives up before the next program once `must_stop` returns True. If the
        capture fails or would compile, a warning is logged.
        """
        with fail_on_recompile():
            self.runner.graphs.capture_wanted(must_stop)
        self.launch_timer.step_started(None, None)  # the capture took longer than the step in flight

    def _launch_and_collect(self) -> None:
        """Launch the next step, then read the previous step's tokens; read them before sampling if masks need them."""
        previous, self._in_flight = self._in_flight, None
        with fail_on_recompile():
            try:
                start = time.perf_counter()
                with self._launch_guard:
                    forward_pass = self._launch_forward()
                if forward_pass and previous and forward_pass.masks_need_unread_tokens:
                    unread, previous = previous, None
                    forward_pass = forward_pass._replace(estimate=None)
                    self._deliver(unread)
                self._in_flight = self._launch_sampling(forward_pass, start) if forward_pass else None
                if previous and previous.copy_done and self._in_flight:
                    seconds, was_late = time.perf_counter() - start, previous.copy_done.query()
                    has_prompts = bool(forward_pass and forward_pass.chunks)
                    self.launch_timer.launched(seconds, was_late, has_prompts)
            except BaseException:
                self._discard_step(previous)
                raise
            self._deliver(previous)
            self._time_next_launch(start if previous is None else None)
            if self._in_flight is None and not self.scheduler.running:
                # Idle: empty the rows now, not before the next prompt.
                self.runner.apply(self._batches.build(SchedulerOutput(), []))

    def _time_next_launch(self, start: float | None) -> None:
        """Pass the start and the predicted duration of the step in flight to the launch timer.

        `start`: time of its launch, if the device was idle; None: it started when the previous step was complete.
        """
        step, scheduler = self._in_flight, self.scheduler
        if step is None or step.copy_done is None or step.estimate is None or self.clock is None:
            self.launch_timer.step_started(None, None)
            return
        is_first = start is not None
        self.launch_timer.step_started(
            start if is_first else self.clock.started,
            step.estimate.predicted_ms, len(scheduler.running), is_first, scheduler.has_prompts,
        )  # fmt: skip

    def _discard_step(self, previous: InFlightStep | None) -> None:
        """Recover from a scheduled step that did not run: keys and values count as computed that were never written."""
        self.launch_timer.step_started(None, None)
        try:
            self._deliver(previous)
        finally:
            self.scheduler.requeue_all()
            self._empty_rows()

    def _empty_rows(self) -> None:
        """Empty all decode rows, also those that a failed step left half written."""
        self.runner.apply(self._batches.empty_rows())

    def _launch_forward(self) -> ForwardPass | None:
        step = self.scheduler.schedule()
        if step is None:
            return None
        running = self.scheduler.running
        assert step.decode == tuple(running[: len(step.decode)]), "the first running sequences decode"
        batch = self._batches.build(step, running)
        output = self.runner.run(batch)
        rows = batch.output_rows(self.plan.max_prefill_sequences)
        sequences = tuple([None if row is None else running[row] for row in rows])
        estimate = None
        if self.clock:
            estimate = self.clock.predictor.estimate(
                step.num_tokens, len(step.decode), step.row_context, step.prefix_pairs, step.prefix
            )
        return ForwardPass(batch, output, sequences, step.chunks, estimate)

    def _launch_sampling(self, forward_pass: ForwardPass, start: float) -> InFlightStep:
        """`start`: when the launch of the step began (time.perf_counter)."""
        with self._launch_guard:
            launched = self._sample_and_copy(forward_pass)
        logprob_chunks = tuple(  # they overwrite the step's buffers, so after sampling
            PromptLogprobs(sequence, begin, Logprobs(*map(to_host, prompt_logprobs)))
            for (sequence, _, _), chunk in zip(forward_pass.chunks, forward_pass.batch.chunks, strict=True)
            if chunk.scored_ids
            for begin, prompt_logprobs in self.runner.compute_prompt_logprobs(chunk)
        )
        if logprob_chunks:
            return launched._replace(logprob_chunks=logprob_chunks, copy_done=record_event(forward_pass.output.tokens))
        return launched._replace(estimate=forward_pass.estimate, launch_seconds=time.perf_counter() - start)

    def _sample_and_copy(self, forward_pass: ForwardPass) -> InFlightStep:
        """Sample if any row is not greedy, and start the copy of the tokens to the host."""
        masks = self._masks(forward_pass.sequences)
        tokens, logprobs = self.runner.sample(forward_pass.batch, forward_pass.output, masks)
        on_host = to_host(tokens)
        step_logprobs = Logprobs(*map(to_host, logprobs)) if logprobs else None
        return InFlightStep(forward_pass.sequences, on_host, step_logprobs, record_event(tokens))

    def _masks(self, sequences: tuple[Sequence | None, ...]) -> Tensor | None:
        """The masks of the constrained outputs, [n, words] int32; None if there are none.

        The host must have read the tokens of all previous steps, because the matchers continue from them.
        """
        constrained = [sequence for sequence in sequences if sequence and sequence.matcher]
        if not constrained:
            return None
        assert all(sequence.num_in_flight == 1 or sequence.finish_reason for sequence in constrained)
        masks = self.runner.make_masks(len(constrained))
        # The token of a sequence that has ended will be dropped.
        fill_masks([None if sequence.finish_reason else sequence.matcher for sequence in constrained], masks.numpy())
        return masks

    def _collect(self, launched: InFlightStep) -> list[NewToken]:
        """Wait for a launched step; returns its tokens, without those of sequences that have ended."""
        self._wait_for(launched)
        for prompt_sequence, start, prompt_logprobs in launched.logprob_chunks:
            count, k = len(prompt_logprobs.chosen), prompt_sequence.params.prompt_logprobs
            prompt_sequence.prompt_logprobs[start : start + count] = [
                row_logprobs(prompt_logprobs, row, k) for row in range(count)
            ]
        tokens = []
        for row, (sequence, token_id) in enumerate(zip(launched.sequences, launched.tokens.tolist(), strict=False)):
            if sequence is None or sequence.finish_reason:  # stopped or aborted after the launch
                continue
            sequence.receive(token_id)
            if sequence.finish_reason:
                self.scheduler.finish(sequence)
                del self._requests[sequence.request_id]
            token_logprobs = row_logprobs(launched.logprobs, row, sequence.params.logprobs)
            token = NewToken(sequence.request_id, token_id, sequence.finish_reason, token_logprobs)
            tokens.append(_with_prompt_info(token, sequence) if sequence.num_output_tokens == 1 else token)
        return tokens

    def _wait_for(self, launched: InFlightStep) -> None:
        """Wait for a launched step, and measure its time."""
        if launched.copy_done is None:  # on a CPU it has run
            if self.clock and launched.estimate:
                self.clock.add(launched.estimate, launched.launch_seconds)
            return
        has_waited, start = not launched.copy_done.query(), time.perf_counter()
        launched.copy_done.synchronize()  # the only place where the host waits for the device
        end = time.perf_counter()
        self.device_wait_seconds += end - start
        if self.clock:
            self.clock.step_completed(launched.estimate, end, has_waited, self._in_flight is not None)

    @property
    def vocab_size(self) -> int:
        return self.runner.vocab_size

    def _deliver(self, launched: InFlightStep | None) -> None:
        self._buffered_tokens += self._collect(launched) if launched else ()


def _with_prompt_info(token: NewToken, sequence: Sequence) -> NewToken:
    """Add the prompt's log-probabilities, its cached tokens and the time in the queue to the first token."""
    has_logprobs = sequence.params.prompt_logprobs is not None
    return token._replace(
        prompt_logprobs=tuple(sequence.prompt_logprobs) if has_logprobs else None,
        queue_seconds=sequence.admitted_at - sequence.submitted_at,
        cached_tokens=sequence.cached_prompt_tokens,
    )

"""`serve --build-packages`: builds the packages of the served model while no request is open.

A child process builds them (start/package_build.py), at the lowest priority, and is stopped (SIGSTOP) while requests
are open. It loads the model again: on a CPU into host memory, on a GPU into the memory that `--memory-fraction` leaves
free. The server continues with its jit programs; the next start uses the packages. Of the
replicas that share a cache folder, the first one builds.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, cast

from tcdeploy.cache.folder.leases import build_lock, is_folder_locked
from tcdeploy.server.generate.admission import Admission

if TYPE_CHECKING:
    from tcdeploy.planning.recipe import Recipe
    from tcdeploy.start.deployment import Deployment
    from tcdeploy.start.package_build import PackageBuild
    from tcdeploy.start.planned import PlannedModel

IDLE_S = 5.0  # without requests, before a build begins or continues
POLL_S = 0.1
log = logging.getLogger("tcdeploy.server")


class PackageBuilder:
    """Builds the packages of a deployment with jit programs. `run` and `stop` are called on the event loop."""

    def __init__(self, deployment: Deployment, admission: Admission) -> None:
        self._deployment, self._admission = deployment, admission
        self._build: PackageBuild | None = None

    async def run(self) -> None:
        """Build the packages, or return at once if they are not needed. A failure is logged as one warning."""
        from tcdeploy.start.package_build import obstacle

        plan, seconds = self._deployment.plan, 0.0
        if plan.programs != "jit":
            return
        failure = obstacle(self._deployment.planned, self._deployment.cache_dir)
        if not failure:
            with build_lock(plan.cache_dir, plan.key) as is_first:
                if not is_first:
                    log.info("plan %s: another process builds its packages, or the lock cannot be taken", plan.key)
                    return
                failure, seconds = await self._build_when_idle()
        if failure:
            log.warning("packages were not built, so later starts use jit programs: %s", failure)
        else:
            log.info("the packages of plan %s were built in %.0f s; the next start uses them", plan.key, seconds)

    def stop(self) -> None:
        """Kill the build."""
        if self._build is not None:
            self._build.stop()

    async def _build_when_idle(self) -> tuple[str, float]:
        """(why no packages were built, or "" if they were; seconds of the build)."""
        from tcdeploy.start.package_build import PackageBuild

        cache_dir = self._deployment.cache_dir
        await self._wait_until_idle()
        try:
            recipe = await asyncio.to_thread(_recipe_of_build, self._deployment)
            self._build = build = PackageBuild(recipe, cache_dir, is_background=True)
        except OSError as error:
            return f"the process cannot be started: {error}", 0.0
        while build.is_running:
            if self._admission.num_admitted and _pause(build, cache_dir):
                await self._wait_until_idle()
                build.resume()
            await asyncio.sleep(POLL_S)
        result = await asyncio.to_thread(build.wait)
        return result.failure, result.seconds

    async def _wait_until_idle(self) -> None:
        """Wait for IDLE_S without requests, and for the end of the compilations of an eager start."""
        admission, swaps = self._admission, self._deployment.swaps
        while admission.closed_reason or admission.idle_seconds() < IDLE_S or (swaps and not swaps.is_finished):
            await asyncio.sleep(POLL_S)


def _pause(build: PackageBuild, cache_dir: str) -> bool:
    """Stop the build; but return False, and let it run, if it may hold the folder's lock: others would wait for it."""
    build.pause()
    if is_folder_locked(cache_dir):
        build.resume()
        return False
    return True


def _recipe_of_build(deployment: Deployment) -> Recipe:
    """On a CPU the deployment's recipe, so that later starts fit the start record. On a GPU, few KV blocks."""
    planned = cast("PlannedModel", deployment.planned)  # true of every start with jit programs
    if planned.plan.device == "cpu":
        return planned.recipe
    from tcdeploy.engine.check.check_prompts import CheckPrompts  # torch and transformers are loaded by now
    from tcdeploy.engine.check.parity_check import FIRST_SEED
    from tcdeploy.start.workers.parallel import few_blocks_recipe

    prompts = CheckPrompts(planned.plan, planned.architecture, planned.config, FIRST_SEED)
    return few_blocks_recipe(planned, prompts)

"""What is taken is given back: after many launches and deaths a server holds what it held before."""

import asyncio
import os
import signal
import threading
from pathlib import Path

from xinference.core.test.clusters import Cluster, running_cluster

ROUNDS = 2
SLACK_TASKS = 2  # a heartbeat may be on its way
SLACK_FDS = 2


class Holdings:
    """Descriptors, tasks, threads and known sub-pools of this process."""

    def __init__(self, cluster: Cluster) -> None:
        self.fds = len(os.listdir("/proc/self/fd"))
        self.tasks = len(asyncio.all_tasks())
        self.threads = threading.active_count()
        self.pools = len(cluster.local.pool._config.get_process_indexes())


async def one_life(cluster: Cluster) -> None:
    """Launch, lose a replica, get it back, terminate."""
    await cluster.launch()
    before = await cluster.replica("m-0")
    os.kill(before["pid"], signal.SIGKILL)
    await cluster.until_state("failed", "m-0")
    await cluster.until_state("ready", "m-0")
    await cluster.supervisor.terminate_model("m", 0.0)
    cluster.assert_nothing_is_left()


async def test_lives_and_deaths_leave_no_descriptor_task_thread_or_pool_behind(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        await one_life(cluster)  # what is made once and kept: connections, caches
        first = Holdings(cluster)
        for _ in range(ROUNDS):
            await one_life(cluster)
        last = Holdings(cluster)
    assert last.fds <= first.fds + SLACK_FDS
    assert last.tasks <= first.tasks + SLACK_TASKS
    assert last.threads <= first.threads
    assert last.pools == first.pools == 1

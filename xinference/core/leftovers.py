"""Files of a worker in shared memory that nobody owns any more."""

from pathlib import Path

from xinference.model.llm.vllm.xavier.directory.sweep import remove_segments


class CacheFiles:
    """Segments and control pages of one worker."""

    def __init__(self, shm_dir: Path, worker_id: str) -> None:
        self._shm_dir = str(shm_dir)
        self._worker_id = worker_id

    def remove_cache(self, replica_uid: str | None) -> int:
        """Remove those of one replica, or of all, whose owner is gone; how many files it was."""
        return len(remove_segments(self._shm_dir, self._worker_id, replica_uid))

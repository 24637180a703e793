"""Which process of a tree is stopped, as the kernel tells it."""

from pathlib import Path

from xinference.model.llm.stopped import MAX_PROCESSES, children_of, stopped_process


def process(proc: Path, pid: int, state: str = "S", children: dict[int, list[int]] | None = None, name: str = "python") -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {state} 1 1 1 0")
    for thread, below in (children or {pid: []}).items():
        (proc / str(pid) / "task" / str(thread)).mkdir(parents=True)
        (proc / str(pid) / "task" / str(thread) / "children").write_text(" ".join(map(str, below)))


def test_the_root_and_every_descendant_are_looked_at(tmp_path: Path) -> None:
    process(tmp_path, 1, children={1: [2], 11: [3]})
    process(tmp_path, 2)
    process(tmp_path, 3, children={3: [4]})
    process(tmp_path, 4, name="VLLM::Engine) Core")
    assert stopped_process(1, tmp_path) is None
    (tmp_path / "4" / "stat").write_text("4 (VLLM::Engine) Core) T 1 1 1 0")
    assert stopped_process(1, tmp_path) == "4 (VLLM::Engine) Core)"
    (tmp_path / "1" / "stat").write_text("1 (keeper) T 1 1 1 0")
    assert stopped_process(1, tmp_path) == "1 (keeper)"


def test_a_process_under_a_debugger_one_that_waits_for_a_disk_and_a_zombie_are_not_stopped(tmp_path: Path) -> None:
    process(tmp_path, 1, children={1: [2, 3, 4]})
    for pid, state in ((2, "t"), (3, "D"), (4, "Z")):
        process(tmp_path, pid, state)
    assert stopped_process(1, tmp_path) is None


def test_processes_that_end_meanwhile_are_passed_over(tmp_path: Path) -> None:
    process(tmp_path, 1, children={1: [2, 3]})
    process(tmp_path, 3, "T")
    assert stopped_process(1, tmp_path) == "3 (python)"
    assert stopped_process(9, tmp_path) is None
    assert children_of(9, tmp_path) == []


def test_a_tree_without_end_is_given_up(tmp_path: Path) -> None:
    process(tmp_path, 1, children={1: [1, 1]})
    assert stopped_process(1, tmp_path) is None
    assert MAX_PROCESSES == 1024

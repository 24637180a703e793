"""``doctor``: the findings about this machine, as a table or JSON."""

import time

import click
from rich.markup import escape

from xinference.deploy.doctor import Finding, Status, judge
from xinference.deploy.machine import survey
from xinference.deploy.output import bytes_text, new_table, print_json, progress_console, result_console
from xinference.deploy.session import Invocation, output_option
from xinference.model.llm.vllm.xavier.directory.sweep import remove_stale
from xinference.settings import Settings, read_settings

STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.BROKEN: "red"}


@click.command("doctor", short_help="Check this machine and say how to mend what is wrong.")
@click.option("--remove-stale", "removes_stale", is_flag=True, help="First remove cache files in shared memory that nobody owns any more.")
@output_option
def doctor(invocation: Invocation, removes_stale: bool) -> int:
    """Check this machine and say how to mend what is wrong. Exits with 1 if something is broken."""
    settings = read_settings(Settings)
    if removes_stale:
        removed = remove_stale(str(settings.shm_dir), time.time())
        freed = bytes_text(sum(file.num_bytes for file in removed))
        progress_console().print(f"{len(removed)} stale files removed, {freed} freed")
    findings = judge(survey(settings))
    if invocation.as_json:
        print_json([finding.to_wire() for finding in findings])
    else:
        _print(findings)
    return 1 if any(finding.status is Status.BROKEN for finding in findings) else 0


def _print(findings: list[Finding]) -> None:
    table = new_table("check", "", "found", "how to mend it")
    for finding in findings:
        style = STYLES[finding.status]
        table.add_row(finding.check, f"[{style}]{finding.status.value}[/{style}]", escape(finding.found), escape(finding.fix or ""))
    result_console().print(table)

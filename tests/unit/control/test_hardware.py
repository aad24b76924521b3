"""What faults of GPUs and memory are taken for."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_elastic.control.hardware import judge_hardware

GPU: dict[str, Any] = {
    "index": 0, "bus": "00000000:18:00.0", "name": "NVIDIA H100 80GB HBM3", "lost": False,
    "corrected": 0, "uncorrected": 0, "repair_pending": False, "repair_failed": False,
    "width": 16, "most_width": 16, "held_down_by": [], "action": "",
}  # fmt: skip
WELL: dict[str, Any] = {
    "gpus": [GPU, {**GPU, "index": 1, "bus": "00000000:19:00.0"}],
    "xids": [],
    "machine_checks": 0,
    "machine_checks_uncorrected": 0,
    "memory_uncorrected": 0,
    "memory_corrected": 12,
}
FELL = ["0000:18:00", 79, "pid=1234, GPU has fallen off the bus.", 1]
WORDS = "RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0x040988e2)"
LINK = ["0000:19:00", 145, WORDS, 1]


def test_a_host_that_is_well_has_no_faults() -> None:
    assert judge_hardware(WELL) == []
    unknown = dict.fromkeys(WELL) | {"gpus": []}
    assert judge_hardware(unknown) == []
    assert judge_hardware({**WELL, "machine_checks": 9}) == [], "a few are normal"
    half = [{**gpu, "width": 8} for gpu in WELL["gpus"]]
    assert judge_hardware({**WELL, "gpus": half}) == [], "as many machines of clouds are wired"
    old = [{**gpu, "most_width": 0} for gpu in WELL["gpus"]]
    assert judge_hardware({**WELL, "gpus": old}) == [], "an old driver does not say"


@pytest.mark.parametrize(
    ("changes", "is_broken", "words"),
    [
        ({"lost": True}, True, "GPU 0 fell off the bus. "),
        ({"uncorrected": 2}, True, "GPU 0: 2 uncorrected memory errors. "),
        ({"repair_failed": True}, True, "cannot be repaired any more. "),
        ({"action": "Drain and Reset"}, True, "GPU 0: its driver asks for: Drain and Reset"),
        ({"corrected": 5000}, False, "GPU 0: 5000 corrected memory errors. "),
        ({"repair_pending": True}, False, "is repaired when it is reset. "),
        ({"width": 8}, False, "8 PCIe lanes of 16, others of its kind have 16. "),
        ({"width": 4, "name": "another"}, False, "4 PCIe lanes of 16. "),
        ({"held_down_by": ["heat", "its power supply"]}, False, "by heat and its power supply. "),
    ],
)
def test_faults_of_a_gpu(changes: dict[str, Any], is_broken: bool, words: str) -> None:
    (fault,) = judge_hardware({**WELL, "gpus": [{**GPU, **changes}, *WELL["gpus"][1:]]})
    assert fault.is_gpu
    assert fault.is_broken is is_broken
    assert words in fault.text


@pytest.mark.parametrize(
    ("changes", "is_broken", "words"),
    [
        ({"xids": [FELL, FELL]}, False, "GPU 0: Xid 79 (fell off the bus) 2 times since"),
        ({"xids": [["0000:AF:00", 48, "", 1]]}, False, "GPU at 0000:AF:00: Xid 48 (uncorrected"),
        ({"machine_checks": 10}, False, "10 machine checks"),
        ({"machine_checks": 3, "machine_checks_uncorrected": 1}, False, "1 uncorrected machine"),
        ({"memory_corrected": 1000}, False, "1000 corrected memory errors of the host, since"),
        ({"memory_uncorrected": 1}, True, "1 uncorrected memory error of the host"),
    ],
)
def test_faults_of_a_host(changes: dict[str, Any], is_broken: bool, words: str) -> None:
    (fault,) = judge_hardware({**WELL, **changes})
    assert fault.is_broken is is_broken
    assert words in fault.text


@pytest.mark.parametrize(
    "event",
    [
        ["0000:18:00", 31, "pid=1, name=python, Ch 00000008", 1],
        ["0000:18:00", 13, "Graphics SM Warp Exception on (GPC 9, TPC 5, SM 0): Out Of Range", 1],
        LINK,
    ],
)
def test_xid_events_of_programs_and_those_that_are_mended_are_none(event: list[Any]) -> None:
    assert judge_hardware({**WELL, "xids": [event]}) == []


def test_what_has_come_since_an_earlier_look_is_more_serious() -> None:
    fatal = [*LINK[:2], WORDS.replace("Nonfatal", "Fatal"), 1]
    (old, new) = judge_hardware({**WELL, "xids": [FELL, fatal]}, {**WELL, "xids": [FELL]})
    assert [(each.what, each.is_broken) for each in (old, new)] == [
        ("GPU 0 Xid 79", False),
        ("GPU 1 Xid 145", True),
    ]
    (again,) = judge_hardware({**WELL, "xids": [FELL, FELL]}, {**WELL, "xids": [FELL]})
    assert again.is_broken
    assert again.number == 2
    often = {**WELL, "xids": [[*FELL[:3], 20_000]]}
    (more,) = judge_hardware(often, {**WELL, "xids": [[*FELL[:3], 10_000]]})
    assert (more.is_broken, more.number) == (True, 20_000)
    contained = ["0000:18:00", 94, "Contained ECC error", 1]
    (mild,) = judge_hardware({**WELL, "xids": [contained]}, WELL)
    assert not mild.is_broken
    (check,) = judge_hardware({**WELL, "machine_checks_uncorrected": 1}, WELL)
    assert check.is_broken


def test_corrected_errors_that_grow_are_a_fault_long_before_there_are_many() -> None:
    grown = [{**GPU, "corrected": 340}, *WELL["gpus"][1:]]
    (fault,) = judge_hardware({**WELL, "gpus": grown}, WELL)
    assert "GPU 0: 340 corrected memory errors, 340 of them in the last hour. " in fault.text
    assert judge_hardware({**WELL, "gpus": grown}, {**WELL, "gpus": grown}) == []
    (fault,) = judge_hardware({**WELL, "memory_corrected": 112}, WELL)
    assert "112 corrected memory errors of the host, 100 of them in the last hour" in fault.text

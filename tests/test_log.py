"""The log: what others write into a message forges no line and fills no disk."""

import logging

import pytest

from moe_serve.log import RareWarnings, configure_logging, get_logger, one_line

FORGED = "host\n04:00:00 E [front end] everything is lost\x1b[2J"


def test_a_newline_in_a_message_forges_no_line(capfd):
    configure_logging(who="front end")
    get_logger("moe_serve.test").warning("refused rank %d from %s", 1, FORGED)
    written = capfd.readouterr().err
    assert written.count("\n") == 1

    assert "\\n04:00:00" in written
    assert "\x1b" not in written


def test_a_traceback_of_ours_keeps_its_lines(capfd):
    configure_logging()
    try:
        raise ValueError("x")
    except ValueError:
        get_logger("moe_serve.test").exception("it failed")
    assert len(capfd.readouterr().err.splitlines()) > 2


def test_ordinary_text_stays_as_it_is():
    assert one_line("Rang 3 «größer» ✓ 日本") == "Rang 3 «größer» ✓ 日本"


def test_a_flood_is_one_line_for_each_source_with_a_count(caplog: pytest.LogCaptureFixture):
    logger = logging.getLogger("test_log")
    warnings = RareWarnings(logger, period_s=1000)
    for _ in range(5000):
        warnings.warn("a", "bad bytes from %s", "a")
    for number in range(5000):
        warnings.warn(f"stranger {number}", "bad bytes")
    assert len(caplog.records) <= 1 + 256 + 1
    warnings._period_s = 0
    warnings.warn("a", "bad bytes from %s", "a")
    assert caplog.records[-1].getMessage() == "bad bytes from a (4999 more since the last such line)"

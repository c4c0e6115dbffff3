"""The log: what others write into a message forges no line and fills no disk."""

import json
import logging
import os
import threading

import pytest

from moe_serve import log
from moe_serve.log import RareWarnings, call_id, configure_logging, get_logger, log_fields, num_logged, one_line
from tests.clock import Clock

FORGED = "host\n04:00:00 E [front end] everything is lost\x1b[2J"


def test_a_newline_in_a_message_forges_no_line(capfd):
    configure_logging(who="front end")
    get_logger("moe_serve.test").warning("refused rank %d from %s", 1, FORGED)
    written = capfd.readouterr().err
    assert written.count("\n") == 1

    assert "\\n04:00:00" in written
    assert "\x1b" not in written


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_that_nobody_reads_holds_up_nobody(form, monkeypatch):
    monkeypatch.setattr("moe_serve.log._PATIENCE_S", 0.05)
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as taken, open(writer, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        configure_logging(who="front end", form=form)
        log = get_logger("moe_serve.test")
        writing = threading.Thread(target=lambda: [log.info("%05d %s", i, "x" * 900) for i in range(200)], daemon=True)
        writing.start()
        writing.join(20)
        goes_on = not writing.is_alive()
        lines = taken.read(1 << 17).decode().splitlines()
        log.info("somebody reads again")
        lines += taken.read(1 << 17).decode().splitlines()
        assert goes_on
    *whole, said, last = lines
    assert f"{200 - len(whole)} lines before this one could not be written (nobody read them)" in said
    assert "somebody reads again" in last
    if form == "json":
        assert json.loads(said)["level"] == "warning"
        assert json.loads(last)["process"] == "front end"


def test_a_traceback_of_ours_keeps_its_lines(capfd):
    configure_logging()
    try:
        raise ValueError("x")
    except ValueError:
        get_logger("moe_serve.test").exception("it failed")
    assert len(capfd.readouterr().err.splitlines()) > 2


def test_ordinary_text_stays_as_it_is():
    assert one_line("Rang 3 «größer» ✓ 日本") == "Rang 3 «größer» ✓ 日本"


def test_a_flood_is_one_line_for_each_source_with_a_count(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    logger = logging.getLogger("test_log")
    warnings, clock = RareWarnings(logger), Clock(monkeypatch, 1.0, log)
    for _ in range(5000):
        warnings.warn("a", "bad bytes from %s", "a")
    for number in range(5000):
        warnings.warn(f"peer {number}", "bad bytes")
    assert len(caplog.records) <= 1 + 256 + 1
    clock.now_s = 62.0
    warnings.warn("a", "bad bytes from %s", "a")
    assert caplog.records[-1].getMessage() == "bad bytes from a (4999 more since the last such line)"


def test_warnings_and_errors_are_counted(capfd):
    configure_logging()
    logger = get_logger("moe_serve.test")
    logger.info("a")
    logger.warning("b")
    logger.error("c")
    logger.error("d")
    assert num_logged() == {"warning": 1, "error": 2}
    configure_logging(form="json")
    assert num_logged() == {"warning": 0, "error": 0}


def test_json_lines_hold_tracebacks_and_strange_text(capfd):
    configure_logging(who="rank 3", form="json")
    logger = get_logger("moe_serve.test")
    logger.warning("refused %s", FORGED)
    try:
        raise ValueError("x")
    except ValueError:
        logger.exception("it failed")
    log_fields(logger, "done", {"n": 3, "name": "a\u2028b"})
    warning, error, done = map(json.loads, capfd.readouterr().err.splitlines())
    assert warning["message"] == f"refused {FORGED}"
    assert (warning["process"], warning["level"]) == ("rank 3", "warning")
    assert "ValueError: x" in error["traceback"]
    assert (done["n"], done["name"]) == (3, "a\u2028b")


def test_a_line_within_a_call_names_it(capfd):
    configure_logging()
    token = call_id.set("trace-9")
    get_logger("moe_serve.test").error("it failed")
    call_id.reset(token)
    get_logger("moe_serve.test").error("it failed")
    first, second = capfd.readouterr().err.splitlines()
    assert first.endswith("it failed x_request_id=trace-9")
    assert second.endswith("it failed")

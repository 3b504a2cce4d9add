"""Progress lines."""

import io

from varjax.progress import Progress


def test_progress_lines():
    stream = io.StringIO()
    progress = Progress("images", 4, stream=stream)
    for done in range(5):
        progress.update(done, note="batch" if done == 1 else "")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[1].startswith("images 1/4") and "s left" in lines[1] and lines[1].endswith("batch")
    assert "left" not in lines[4]


def test_progress_is_quiet_or_rare_on_request():
    stream = io.StringIO()
    Progress("images", 4, quiet=True, stream=stream).update(2)
    assert stream.getvalue() == ""
    rare = Progress("steps", 100, every=3600.0, stream=stream)
    for done in range(101):
        rare.update(done)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["0/100", "100/100"]


def test_time_left_does_not_count_the_compilation_of_the_first(monkeypatch):
    clock = iter(
        [100.0, 110.0, 111.0, 112.0]
    )  # start, then 10 s for the first and 1 s for each more
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    progress = Progress("images", 12, first=2, stream=stream)
    for done in (3, 4, 5):
        progress.update(done)
    left = [line.split("about ")[1] for line in stream.getvalue().splitlines()]
    assert left == ["90 s left", "8 s left", "7 s left"]

"""Progress lines, and how much time is said to be left."""

import io

import pytest

from varjax.core.errors import UserError
from varjax.generation.progress import Progress, reporter, show_seconds


def test_progress_lines():
    stream = io.StringIO()
    progress = Progress("images", 4, stream=stream)
    for done in range(5):
        progress.update(done, note="batch" if done == 1 else "")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5 and "left" not in lines[0]
    assert lines[1].startswith("images 1/4") and "s left" in lines[1] and lines[1].endswith("batch")
    assert "left" not in lines[4]


def test_time_left_does_not_count_the_compilation_of_the_first(monkeypatch):
    now, stream = [100.0], io.StringIO()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = Progress("images", 60, first=2, stream=stream)
    for done, seconds in ((3, 10), (4, 1), (5, 1), (25, 60)):
        now[0] += seconds
        progress.update(done)
    left = [line.split("about ")[1] for line in stream.getvalue().splitlines()]
    assert left == ["10 min left", "56 s left", "55 s left", "99 s left"]  # 62 s for 22


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.2, "0 s"), (99.4, "99 s"), (170, "3 min"), (5940, "99 min"), (9000, "2.5 h")]
    + [(47.9 * 3600, "47.9 h"), (70 * 3600, "3 days")],
)
def test_units(seconds, shown):
    assert show_seconds(seconds) == shown


def test_what_the_python_api_takes(capsys):
    seen = []
    for progress in (False, True, lambda done, total: seen.append((done, total))):
        for done in (0, 2, 4):
            reporter(progress, "image")(done, 4)
    assert seen == [(0, 4), (2, 4), (4, 4)]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["0/4", "2/4", "4/4"]
    for function in (print, seen.insert, lambda *counts: None):
        assert reporter(function, "image") is function
    for wrong in (1, "yes", None):
        with pytest.raises(UserError, match=r"progress=.*function \(done, total\)"):
            reporter(wrong, "image")

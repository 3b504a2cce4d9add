"""Budgets as bytes, and as what fits a device."""

import re

import pytest

from experiments import budgets
from varjax.core.errors import UserError
from varjax.generation import memory

MODEL = ("--model=var-d30", "--policy=streaming", "--batch_size=8")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2GiB", 2 << 30),
        ("512 MiB", 512 << 20),
        ("1.5gb", 1_500_000_000),
        ("4096", 4096),
        ("0.5KiB", 512),
    ],
)
def test_bytes(text, number):
    assert budgets.parse_bytes(text) == number


@pytest.mark.parametrize(
    "text", ["", "GiB", "2 Gigs", "-1GiB", "nan", "1e9", "0", "0.1B", "1" * 30]
)
def test_what_is_no_number_of_bytes(text):
    with pytest.raises(UserError, match="write 2GiB"):
        budgets.parse_bytes(text)


@pytest.mark.parametrize("accounting", ["bytes", "tokens"])
def test_a_plan_of_so_many_bytes(call, accounting):
    """As many as were asked for at most, and not much fewer."""
    more = f"--policy_args=accounting={accounting}"
    status, out, err = call("plan", *MODEL, "--kv_bytes=1GiB", more)
    assert status == 0, err
    held = int(re.search(r"bytes     (\d+)", out)[1])
    assert 0.97 * 2**30 < held <= 2**30
    assert re.search(r"budget    0\.\d+ of the full cache: .* of .*, batch 8", out)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--kv_bytes=1KiB",), "--kv_bytes=1KiB: 1 KiB are 0.000% of the full cache"),
        (("--kv_bytes=2 Gigs",), "'2 Gigs' is no number of bytes"),
        (("--kv_bytes=1GiB", "--budget=0.1"), "--budget and --kv_bytes exclude each other"),
        (("--budget=fits",), "--budget=fits is not valid: it must be a number, or fit"),
        (("--budget=fit", "--target=h2000"), "--target=h2000: unknown chip"),
        (("--budget=fit", "--target=a100", "--batch_size=100000"), "no budget of streaming fits"),
        (("--kv_bytes=1GiB", "--policy=full"), "policy 'full' takes no budget"),
    ],
)
def test_wrong_budgets(refused, flags, message):
    refused("plan", message, *MODEL, *flags)


def test_what_fits_a_chip(call):
    """The largest: a little more does not fit."""
    flags = (*MODEL[:2], "--batch_size=1200", "--budget=fit", "--target=a100")
    status, out, err = call("plan", *flags)
    assert status == 0, err
    found = float(re.search(r"budget    ([\d.]+) of the full cache.* a100", out)[1])
    assert 0.1 < found < 0.9
    status, out, _ = call("plan", *MODEL, "--budget=fit", "--target=h200")
    assert status == 0 and "budget    1 of the full cache" in out


def test_whether_the_full_cache_fits(call, refused):
    flags = ("--model=var-d30", "--policy=full", "--budget=fit", "--target=l4")
    status, out, err = call("plan", *flags, "--batch_size=8")
    assert status == 0 and "budget    1 of the full cache" in out and ": fits l4, of" in out, err
    refused("plan", "the full cache does not fit: a batch of 800 needs", *flags, "--batch_size=800")


def test_a_run_takes_what_fits(call, checkpoint, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 40 * 2**20)
    flags = (checkpoint, "--policy=streaming", "--labels=3,7", "--dry_run")
    status, out, err = call("run", *flags, "--budget=fit")
    assert status == 0 and "of the full cache: " in out, err
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    status, _, err = call("run", *flags, "--budget=fit")
    assert status == 2 and "no budget of streaming fits" in err

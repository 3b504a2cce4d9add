"""`python -m experiments.bench`: the command is in `command`."""

from experiments.bench.command import main
from varjax.cli import command_line

command_line.run(main)

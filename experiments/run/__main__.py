"""`python -m experiments.run`: the command is in `command`."""

from experiments.run.command import main
from varjax.cli import command_line

command_line.run(main)

"""`python -m experiments.aot`: the command is in `command`."""

from experiments.aot.command import main
from varjax.cli import command_line

command_line.run(main)

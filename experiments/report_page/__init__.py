"""The page that `experiments.report` writes: figures as inline SVG, one small script, no other
files."""

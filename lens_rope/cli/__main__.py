"""`python -m lens_rope.cli` is `lens-rope`."""

from lens_rope.cli import main

main()

"""Options that several commands share, and what they default to.

Typer reads the annotations at run time.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from lens_rope.reporting.prompts import DEFAULT_MAX_TOKENS

# The same as lens_rope.demo.DEMO_MODEL, which cannot be imported here because it needs torch.
DEMO_MODEL = "smollm2-135m"
CHECK_MAX_TOKENS = 128


class Backend(str, Enum):
    """How the model is run."""

    auto = "auto"
    hooked = "hooked"
    bridge = "bridge"


class Attention(str, Enum):
    """How the model computes attention while it is read."""

    auto = "auto"
    eager = "eager"
    fused = "fused"


class ReportFormat(str, Enum):
    """What a report is written as."""

    html = "html"
    json = "json"
    csv = "csv"


class TableFormat(str, Enum):
    """What a table is printed as."""

    table = "table"
    json = "json"
    csv = "csv"


class HowToAblate(str, Enum):
    """What becomes of an ablated pair."""

    zero = "zero"
    mean = "mean"
    unrotate = "unrotate"


def _limit(default: int) -> Any:
    return typer.Option(
        min=1,
        help=f"Cut longer prompts to this many tokens. Default: {default:,}, or the model's "
        "context where that is shorter.",
    )


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Hub name, local directory, .gguf file, or smollm2-135m (the demo)."
    ),
]
Text = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="A prompt. Can be repeated. Default: the sample text, where no prompt is given.",
    ),
]
File = Annotated[
    list[Path] | None,
    typer.Option("--file", help="A text file (UTF-8) that is one prompt. Can be repeated."),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        help='A file of JSON lines, each a prompt: an object with "text" and maybe "name".',
    ),
]
Layers = Annotated[str | None, typer.Option(help="Layers to read, like 0-3,7. Default: all.")]
MaxTokens = Annotated[int | None, _limit(DEFAULT_MAX_TOKENS)]
CheckMaxTokens = Annotated[int | None, _limit(CHECK_MAX_TOKENS)]
Context = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Trained context in tokens, over which cycles are counted. Default: what the model's "
        "configuration says.",
    ),
]
BackendOption = Annotated[
    Backend,
    typer.Option(
        help="Run the model as HookedTransformer (hooked) or TransformerBridge (bridge); auto "
        "takes the first that computes what the published model computes."
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="Where to run the model, such as cpu or cuda. Default: the best there is."),
]
Dtype = Annotated[
    str, typer.Option(help="Precision to run the model in: float32, bfloat16 or float16.")
]
AttentionOption = Annotated[
    Attention,
    typer.Option(
        help="How the model computes attention while it is read: eager forms all scores of a layer "
        "at once; fused does not, for long prompts; auto takes fused where eager would need much "
        "memory and the model can be run so."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, help="Threads that torch computes with on the CPU. Default: one for each core."
    ),
]
Format = Annotated[
    TableFormat,
    typer.Option("--format", help="Print a table for people, or JSON or CSV for programs."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of what is drawn at random.")]

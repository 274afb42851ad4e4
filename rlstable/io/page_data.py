"""JSON data embedded in an HTML page."""

from __future__ import annotations

import json
from typing import Any


def embedded(data: Any) -> str:
    """Data as JSON that is safe inside a `script` element.

    Raises:
        ValueError: A number is not finite.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # Unescaped, `</script>` would end the element and `<!--` would start a comment.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

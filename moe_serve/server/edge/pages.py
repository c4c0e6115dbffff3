"""Pages for browsers: files of the package, under a policy that lets them load from this server alone."""

from collections.abc import Mapping
from importlib import resources

from fastapi import FastAPI, Response

from moe_serve.server.edge.guard import OPEN

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def add_pages(app: FastAPI, files: Mapping[str, str]) -> None:
    """Adds routes that are open to all. files: names in server/pages, by path"""
    folder = resources.files("moe_serve.server") / "pages"

    def add(path: str, name: str) -> None:
        content, media_type = (folder / name).read_bytes(), _MEDIA_TYPES[name.rpartition(".")[2]]

        @app.get(path, include_in_schema=False, tags=[OPEN])
        async def file() -> Response:
            return Response(content, media_type=media_type, headers=PAGE_HEADERS)

    for path, name in files.items():
        add(path, name)

"""The site has the repository's own layout, so that a relative link means the same there and in the sources."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

BESIDE_DOCS = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "checkpoints/tiny-mtp/README.md",
    "kernels_pallas/NOTES.md",
)
"""Pages that live where they belong and are part of the site: the README is its first page."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages of docs/ at docs/..., and those of `BESIDE_DOCS` at their own paths."""
    root = Path(config.config_file_path).parent

    def at_its_path(path: str) -> File:
        return File(path, str(root), config.site_dir, config.use_directory_urls)

    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
            if file.inclusion.is_included():
                files.append(at_its_path(f"docs/{file.src_uri}"))
    for path in BESIDE_DOCS:
        files.append(at_its_path(path))
    return files

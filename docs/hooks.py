"""The site has the repository's own layout, so that a relative link means the same there and in the sources."""

from pathlib import Path

import commands
import notebook_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

COMMANDS_PAGE = "docs/reference/cli.md"
NOTEBOOKS_PAGE = "docs/notebooks.md"
BESIDE_DOCS = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "checkpoints/tiny-mtp/README.md",
    "checkpoints/smollm2-mtp/README.md",
    "kernels_pallas/NOTES.md",
)
"""Pages that live where they belong and are part of the site: the README is its first page."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """In the navigation the pages of commands and of notebooks stand after those that name them all."""
    for section in config.nav or ():
        for pages in section.values() if isinstance(section, dict) else ():
            if isinstance(pages, list) and COMMANDS_PAGE in pages:
                place = pages.index(COMMANDS_PAGE)
                pages[place] = {"Commands": [COMMANDS_PAGE, *commands.pages()]}
            if isinstance(pages, list) and NOTEBOOKS_PAGE in pages:
                pages += [path for path in notebook_pages.pages(_root(config)) if path.endswith(".md")]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages of docs/ at docs/..., those of `BESIDE_DOCS` at their own paths, commands and notebooks."""
    root = _root(config)

    def at_its_path(path: str) -> File:
        return File(path, str(root), config.site_dir, config.use_directory_urls)

    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
            if file.inclusion.is_included():
                files.append(at_its_path(f"docs/{file.src_uri}"))
    for path in BESIDE_DOCS:
        files.append(at_its_path(path))
    for notebook in sorted(root.glob("notebooks/*.ipynb")):
        files.append(at_its_path(str(notebook.relative_to(root))))
    for path, content in {**commands.pages(), **notebook_pages.pages(root)}.items():
        files.append(File.generated(config, path, content=content))
    return files


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent

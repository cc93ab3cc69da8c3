"""Writes the pages of docs/reference, and removes those that nothing makes any more."""

from tools.reference.pages import FOLDER, reference_pages

if __name__ == "__main__":
    pages = reference_pages()
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.iterdir():
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        (FOLDER / name).write_text(text, encoding="utf-8")

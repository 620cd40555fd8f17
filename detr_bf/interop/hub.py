"""Folders on the Hugging Face Hub, through huggingface_hub: fetched, and sent.

huggingface_hub is imported at the first use. It has its own cache (HF_HOME), tokens (HF_TOKEN), address (HF_ENDPOINT)
and offline mode (HF_HUB_OFFLINE).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from detr_bf.common.errors import InputError
from detr_bf.common.text import printable

_ADDRESS = re.compile(r"hf://(?P<id>[^/@]+/[^/@]+)(?:@(?P<revision>.+))?")
_FILES = ("config.json", "model.safetensors", "preprocessor_config.json", "README.md")


def is_hub_address(text: str) -> bool:
    """Return True for ``hf://...``; :class:`pathlib.Path` makes one slash of the two."""
    return text.startswith("hf:/")


def hub_folder(address: str) -> Path:
    """Return the local folder of ``hf://user/name`` or ``hf://user/name@revision``, downloaded if it is not cached.

    Raises:
        InputError: the address is not of this form, huggingface_hub is not installed, or the repository cannot be
            downloaded.
    """
    address = re.sub("^hf:/+", "hf://", address)
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise InputError(f"{printable(address)}: expected hf://user/name or hf://user/name@revision")
    library = _library()
    try:
        folder = library.snapshot_download(found["id"], revision=found["revision"], allow_patterns=list(_FILES))
    except (ValueError, *library.errors.HfHubHTTPError.__bases__) as error:
        raise InputError(
            f"{printable(address)} cannot be downloaded from the Hugging Face Hub: {_first_line(error)}. Without a "
            f"network: give the path of a folder with {', '.join(_FILES[:2])}"
        ) from error
    return Path(folder)


def send_folder(folder: Path, repository: str, *, private: bool) -> str:
    """Make the repository ``user/name`` unless it exists, send the folder, and return the address of the commit.

    Raises:
        InputError: huggingface_hub is not installed, there is no token, or the Hub refuses.
    """
    library = _library()
    api = library.HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Detector of detr_bf"))
    except (ValueError, *library.errors.HfHubHTTPError.__bases__) as error:
        raise InputError(
            f"{printable(repository)} cannot be sent to the Hugging Face Hub: {_first_line(error)}. The network must "
            "reach the Hub, and writing needs 'hf auth login', or HF_TOKEN with a token that may write"
        ) from error


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise InputError(f"the Hugging Face Hub needs a package: pip install 'detr_bf[hub]' ({error})") from error
    return huggingface_hub


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[0] if lines else type(error).__name__)

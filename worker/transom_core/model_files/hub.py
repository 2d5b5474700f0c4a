"""Downloads from the Hugging Face hub those files of a model that a process needs, and no others.

- **text files**: the configs, the tokenizer and the chat templates; all that a router needs.
- **weight files**: those that the index names (`text_files`), or `model.safetensors` if there is no index. A repository's
  folders (`original/`), other formats of the same weights (`consolidated.safetensors`) and pickles are never downloaded.
- **revision**: an id may end with `@` and a branch, tag or commit. Without one it is the newest commit at the time of the download.

`huggingface_hub` keeps the files in its cache, which all processes of a host share, so a file is downloaded once. If the connection
breaks, the download resumes inside the file. If the process ends, the next start keeps whole files and downloads partial ones from
their beginning: version 2.4 gives a partial file another name in each process, so that two processes never write to one file. On a
terminal `huggingface_hub` shows progress bars; elsewhere, such as in a Ray worker, `LoggedProgress` logs every ten seconds.
"""

import glob
import io
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transom_core.errors import ModelError
from transom_core.model_files.text_files import INDEX_FILE, MODELOPT_FILE, SINGLE_FILE, read_weight_index

logger = logging.getLogger("transom.worker")

CONFIG_FILE = "config.json"
TEXT_FILES = (
    *(CONFIG_FILE, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tekken.json"),
    *("tiktoken.model", "chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
    MODELOPT_FILE,
)
LOG_PERIOD_S = 10.0


def download(hub_id: str, patterns: Sequence[str], **options: Any) -> Path:
    """Download the files of a model whose names match one of `patterns`; return their folder.

    `options` are further ones of `snapshot_download`.

    Raises:
        ModelError: they could not be downloaded, and are not in the local cache.
    """
    from huggingface_hub import snapshot_download  # imported late: it takes half a second
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    hub_id, _, revision = hub_id.partition("@")
    if revision:
        options = {"revision": revision, **options}
    if not sys.stderr.isatty():
        options["tqdm_class"] = _logged_progress(hub_id)
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns), **options))
    except GatedRepoError:
        raise ModelError(f"{hub_id} needs its terms accepted on Hugging Face, then HF_TOKEN set.") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"Hugging Face has no model {hub_id!r}, or it is private; check the spelling, or set HF_TOKEN."
        ) from None
    except RevisionNotFoundError:
        raise ModelError(
            f"{hub_id} has no revision {revision!r} on Hugging Face; give a branch, a tag or a commit."
        ) from None
    except Exception as error:  # the client's own errors, its transport's and the disk's have no common root
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"{hub_id} is neither a folder here nor in the Hugging Face cache, and could not be downloaded ({reason}). "
            "Check the network and start again (whole files are kept), or give a folder, a .gguf file, or smollm2 (the demo)."
        ) from None


def download_model(hub_id: str) -> Path:
    """Download a model's text files and weight files; return their folder.

    Raises:
        ModelError: they could not be downloaded, and are not in the local cache; or the index is wrong.
    """
    folder = download(hub_id, [*TEXT_FILES, INDEX_FILE])
    commit = folder.name  # the weights must be of the same commit, even if another one is pushed meanwhile
    if (folder / INDEX_FILE).exists():
        names = sorted({glob.escape(name) for name in read_weight_index(folder / INDEX_FILE).values()})
        return download(hub_id, names, revision=commit)
    download(hub_id, [SINGLE_FILE], revision=commit)
    if not (folder / SINGLE_FILE).exists():  # the weights have other names; only the repository's top folder counts
        download(hub_id, ["*.safetensors"], revision=commit, ignore_patterns=["*/*", "consolidated*"])
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{hub_id} has no .safetensors file, or this machine is offline and its cache has none: pickled weights are never "
            "loaded; download the weights where there is a network."
        )
    return folder


def _logged_progress(hub_id: str) -> type[Any]:
    """Return a progress bar class that logs how many bytes of a model have come, every `LOG_PERIOD_S` seconds and at the end."""
    from tqdm import tqdm

    class LoggedProgress(tqdm):  # type: ignore[type-arg]
        """A progress bar that logs. `huggingface_hub` makes several: of files, of received bytes (logged), and of written bytes."""

        def __init__(self, *args: Any, **options: Any) -> None:
            options |= {"file": io.StringIO(), "disable": False}
            # Two bars count bytes: received ones, which are logged, and written ones, described as "Reconstructing ...".
            self._counts_bytes = options.get("unit") == "B" and not str(options.get("desc")).startswith("Reconstruct")
            self._logged_s = time.monotonic()
            super().__init__(*args, **options)

        def display(self, *_: Any, **__: Any) -> None:
            if self._counts_bytes and time.monotonic() - self._logged_s >= LOG_PERIOD_S:
                self._log()

        def close(self) -> None:
            if self._counts_bytes and self.n and not getattr(self, "_is_closed", False):
                self._log()
            self._is_closed = True
            super().close()

        def _log(self) -> None:
            self._logged_s = time.monotonic()
            logger.info("Downloading %s: %.2f of %.2f GB.", hub_id, self.n / 1e9, (self.total or self.n) / 1e9)

    return LoggedProgress

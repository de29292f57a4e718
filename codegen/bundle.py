"""The files of a launch as they lie on the shared home: driver, archive, secrets."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NamedTuple

from codegen.archive import executor_archive
from codegen.spec import Job, SpecError
from executor import protocol


class Bundle(NamedTuple):
    """A rendered driver and what must lie beside it."""

    job: Job
    driver: str

    def write(self, directory: str) -> str:
        """Write everything into `directory` (0700, made if missing; the files 0600); returns the driver's path."""
        write_files(directory, self.files())
        return os.path.join(directory, protocol.DRIVER_NAME)

    def files(self) -> dict[str, bytes]:
        """Names and contents, the driver last: where it is found, all is."""
        files = {protocol.SECRETS_NAME: json.dumps(dict(self.job.secrets)).encode()} if self.job.secrets else {}
        files[protocol.ARCHIVE_NAME] = executor_archive()
        files[protocol.DRIVER_NAME] = self.driver.encode("utf-8", "surrogateescape")
        return files


def write_files(directory: str, files: Mapping[str, bytes]) -> None:
    """Into a directory that is made if missing (0700); the files 0600. Raises SpecError."""
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    except OSError as error:
        raise SpecError(f"cannot write {directory}: {error.strerror}") from error
    for name, content in files.items():
        _write(os.path.join(directory, name), content)


def _write(path: str, content: bytes) -> None:
    """A whole file with mode 0600, or none: a half-written driver must not be found."""
    temporary = path + ".tmp"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror}") from error

"""Drafters by the name of their trained head: read from a folder or a hub id, or what comes with model or package."""

from __future__ import annotations

from pathlib import Path

from foredraft.backends.base import Backend
from foredraft.backends.transformers import TransformersBackend
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.heads.files import Head, bundled_heads, load_head
from foredraft.heads.model_layer import own_head
from foredraft.heads.parallel import ParallelHead
from foredraft.models import BUNDLED, ModelFiles, Notify, is_bundled, resolve_head
from foredraft.proposers.base import Drafter
from foredraft.proposers.eagle import RecurrentDrafter
from foredraft.proposers.heads import require_features
from foredraft.proposers.medusa import ParallelDrafter


class Trained(RecurrentDrafter):
    """A drafter whose name is the kind of its head."""

    @classmethod
    def for_target(
        cls,
        target: Backend,
        argument: str = "",
        files: ModelFiles | None = None,
        notify: Notify = lambda _: None,
    ) -> Drafter:
        """With the head that the argument names: a folder, or a hub id.

        Args:
            target: What it drafts for.
            argument: The reference; may be empty if the kind can be had without.
            files: The target's, if it has any.
            notify: Told before anything is fetched.

        Raises:
            UnsupportedError: The head is for another target, or the target hands out no features, or nothing is there
                without a reference.
            InvalidInputError: The head is of another kind.
            ModelError: It cannot be read.
        """
        require_features(target, cls.name)
        if not argument:
            return drafter_of(cls.without_reference(target, files), target)
        return drafter_of(head_of(cls.name, argument, target, notify), target)

    @classmethod
    def without_reference(cls, target: Backend, files: ModelFiles | None) -> Head:
        """The head that is there without being named."""
        raise InvalidInputError(f"Drafter '{cls.name}' needs the folder or hub id of a head: {cls.name}:REF.")


class Eagle3(Trained):
    """EAGLE-3; without a reference the one that comes with the package for this very model."""

    name = "eagle3"
    usage = "eagle3[:REF]"

    @classmethod
    def without_reference(cls, target: Backend, files: ModelFiles | None) -> Head:
        """The bundled one."""
        folder = cls._bundled_for(files)
        if folder is not None:
            return load_head(folder, target)
        known = ", ".join(bundled_heads(cls.name)) or "none yet"
        raise UnsupportedError(
            f"No EAGLE-3 head comes with foredraft for this model (only for: {known}). Give one, eagle3:REF, or train "
            "one: foredraft train eagle3 MODEL."
        )

    @classmethod
    def comes_with(cls, files: ModelFiles | None) -> bool:
        """Whether there is a bundled one for the model in these files."""
        return cls._bundled_for(files) is not None

    @classmethod
    def _bundled_for(cls, files: ModelFiles | None) -> Path | None:
        if files is None:
            return None
        bundled = bundled_heads(cls.name).items()
        fits = (folder for name, folder in bundled if name in BUNDLED and is_bundled(files, BUNDLED[name]))
        return next(fits, None)


class Eagle(Trained):
    """EAGLE-1, with the trees of EAGLE-2."""

    name = "eagle"
    usage = "eagle:REF"


class MTP(Trained):
    """Multi-token prediction; without a reference by the layers that the model's own checkpoint has for it."""

    name = "mtp"
    usage = "mtp[:REF]"

    @classmethod
    def without_reference(cls, target: Backend, files: ModelFiles | None) -> Head:
        """The model's own."""
        folder = files.path if files is not None else _folder_of(target)
        if folder is None or not folder.is_dir():
            raise UnsupportedError(
                "Drafter 'mtp' without a reference reads the MTP layers in the folder of the target's safetensors, and "
                "this target is in none. Give a head, mtp:REF, or train one: foredraft train mtp MODEL."
            )
        return own_head(folder, target)


class Medusa(Trained):
    """Medusa heads."""

    name = "medusa"
    usage = "medusa:REF"


def head_of(kind: str, reference: str, target: Backend, notify: Notify = lambda _: None) -> Head:
    """The head of a kind that a reference names: a folder, a hub id, or the bundled model that one comes with.

    Raises:
        ForedraftError: As `Trained.for_target` does.
    """
    bundled = bundled_heads(kind)
    folder = bundled[reference] if reference in bundled else resolve_head(reference, notify)
    head = load_head(folder, target)
    if head.kind != kind:
        raise InvalidInputError(f"The head in {folder} is of kind '{head.kind}': ask for {head.kind}:{reference}.")
    return head


def drafter_of(head: Head, target: Backend) -> Drafter:
    """The drafter that runs a head."""
    return ParallelDrafter(head, target) if isinstance(head, ParallelHead) else RecurrentDrafter(head, target)


def _folder_of(target: Backend) -> Path | None:
    """Where a transformers model was loaded from."""
    where = target.model.name_or_path if isinstance(target, TransformersBackend) else ""
    return Path(where) if where else None

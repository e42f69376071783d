"""Checkpoints, from the Accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

from notebook_launcher import context
from notebook_launcher.training import checkpoints
from notebook_launcher.training.unwrapping import unwrap_model

if TYPE_CHECKING:
    import collections
    import os
    from collections.abc import Callable

__all__ = ["SavingMethods"]


class SavingMethods:
    """Saving and loading of models and of whole training states."""

    state: Any
    project_configuration: Any
    _custom_objects: list[Any]
    _save_hooks: collections.OrderedDict[int, Callable[..., Any]]
    _load_hooks: collections.OrderedDict[int, Callable[..., Any]]

    @property
    def project_dir(self) -> str | None:
        """The project's folder."""
        directory: str | None = self.project_configuration.project_dir
        return directory

    @property
    def logging_dir(self) -> str | None:
        """Where trackers write."""
        directory: str | None = self.project_configuration.logging_dir
        return directory

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return int(self.project_configuration.iteration)

    @property
    def should_save_model(self) -> bool:
        """Whether this rank is the one of its machine that writes models, where code does so by itself."""
        return bool(self.state.is_local_main_process)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:  # noqa: FBT001, FBT002
        """Write an object to a file, once, and whole or not at all."""
        on_each_node = bool(self.project_configuration.save_on_each_node)
        checkpoints.save(obj, f, save_on_each_node=on_each_node, safe_serialization=safe_serialization)

    def save_model(
        self,
        model: Any,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,  # noqa: FBT001, FBT002 - Accelerate's signature
    ) -> None:
        """Write a model's weights under Hugging Face's file names.

        Args:
            model: As `prepare` returned it, or not.
            save_directory: Where to.
            max_shard_size: A file is not larger, unless one tensor is; bytes, or a text such as `"200MB"`.
            safe_serialization: safetensors; False: `torch.save`.
        """
        with context.activity(context.SAVING):
            checkpoints.save_model(unwrap_model(model), save_directory, max_shard_size, safe_serialization)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,  # noqa: FBT001, FBT002 - Accelerate's signature
        **save_model_func_kwargs: Any,
    ) -> Any:
        """Write everything that training needs to go on, so that a crash at any moment leaves a whole checkpoint.

        Every rank must call it.

        Args:
            output_dir: The folder; None: the next one by `ProjectConfiguration(automatic_checkpoint_naming=True)`.
            safe_serialization: Models as safetensors; False: by `torch.save`.
            save_model_func_kwargs: Handed to the model's writer.

        Returns:
            The folder.
        """
        with context.activity(context.SAVING):
            return checkpoints.save_state(self, output_dir, safe_serialization, **save_model_func_kwargs)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> Any:
        """Load what `save_state` wrote, also with another number of ranks; everything is checked first.

        Every rank must call it.

        Args:
            input_dir: The folder; None: the newest by automatic naming.
            load_kwargs: For the loading of objects that `register_for_checkpointing` was given.
            load_model_func_kwargs: For `load_state_dict` of the models.
        """
        return checkpoints.load_state(self, input_dir, load_kwargs, **load_model_func_kwargs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects too.

        Raises:
            ValueError: One lacks `state_dict` or `load_state_dict`; the message lists which.
        """
        checkpoints.check_custom_objects(objects)
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before models are saved; it may take weights out to save them."""
        return _register(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call `hook(models, input_dir)` before models are loaded; it may take models out to load them."""
        return _register(self._load_hooks, hook)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002
        """Return a prepared model's weights, by the names that the model itself gives them."""
        state: dict[str, Any] = (unwrap_model(model, keep_torch_compile=False) if unwrap else model).state_dict()
        return state


def _register(hooks: collections.OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle

"""Names of Accelerate's without a counterpart: they can be imported, and raise where they are used."""

from __future__ import annotations

from typing import Any

REFUSED = {
    "It is internal to Accelerate's FSDP. Pass fsdp_plugin=, and call prepare, save_state, load_state, save_model.": """
        disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading
        ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model
        fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler load_fsdp_model load_fsdp_optimizer
        save_fsdp_model save_fsdp_optimizer""",
    "Load the sharded checkpoint with load_state, on any number of ranks; save_model then writes whole weights.": """
        merge_fsdp_weights""",
    "It belongs to DeepSpeed's engine. Pass deepspeed_plugin=, which torch carries out; or run DeepSpeed itself.": """
        DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DeepSpeedSequenceParallelConfig
        GatheredParameters HfDeepSpeedConfig compile_regions_deepspeed deepspeed_required get_active_deepspeed_plugin
        map_pytorch_optim_to_deepspeed prepare_deepspeed_cmd_env""",
    "An optimizer or a scheduler in DeepSpeed's file is not supported. Create it with torch, and prepare that.": """
        DummyOptim DummyScheduler""",
    "Megatron-LM is not supported. Run the program with Accelerate.": """
        AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader MegatronLMDummyScheduler
        MegatronLMOptimizerWrapper MegatronLMPlugin MegatronLMSchedulerWrapper T5TrainStep
        add_model_config_to_megatron_parser avg_losses_across_data_parallel_group gather_across_data_parallel_groups
        megatron_lm_initialize megatron_lm_prepare_data_loader megatron_lm_prepare_model_optimizer_scheduler
        megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler""",
    "Only data parallelism is supported. Leave it out, or apply torch's own parallelism to the model.": """
        TorchContextParallelConfig TorchTensorParallelPlugin
        get_model_tp_size prepare_pippy""",
    'fp8 is not supported. Use mixed_precision="bf16".': """
        AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs apply_fp8_autowrap contextual_fp8_autocast
        convert_model convert_model_to_fp8_ao filter_first_and_last_linear_layers has_ao_layers
        has_transformer_engine_layers torchao_required""",
    "Big-model inference is not supported. Load the model with its own library, on the device of each rank.": """
        AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook OffloadedWeightsLoader PrefixedDataset SequentialHook
        UserCpuOffloadHook add_hook_to_module align_module_device attach_align_device_hook
        attach_align_device_hook_on_blocks attach_execution_device_hook attach_layerwise_casting_hooks
        calculate_maximum_sizes check_device_map clean_device_map compute_module_sizes cpu_offload
        cpu_offload_with_hook disk_offload dispatch_model extract_submodules_state_dict find_tied_parameters
        get_balanced_memory get_max_layer_size get_max_memory has_offloaded_params infer_auto_device_map
        init_empty_weights init_on_device load_checkpoint_and_dispatch load_checkpoint_in_model load_offloaded_weight
        load_offloaded_weights named_module_tensors offload_state_dict offload_weight remove_hook_from_module
        remove_hook_from_submodules retie_parameters save_offload_index set_module_tensor_to_device""",
    "Quantisation is not supported. Quantise the model with its own library before the launch.": """
        BnbQuantizationConfig CustomDtype has_4bit_bnb_layers load_and_quantize_model""",
    "TPUs are not supported. Run the program with Accelerate's own notebook_launcher.": "install_xla prepare_tpu",
    'It is not supported. Pass dynamo_backend="inductor" to Accelerator, or call torch.compile.': """
        DynamoBackend TorchDynamoPlugin compile_regions compile_regions_fsdp2""",
    "It belongs to `accelerate launch`. Use notebook_launch, or this module's notebook_launcher.": """
        ComputeEnvironment PrepareForLaunch SageMakerDistributedType prepare_multi_gpu_env
        prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env set_numa_affinity""",
    "It is internal to Accelerate. Call the method of Accelerator that does it: save_state, load_state, autocast.": """
        DataLoaderAdapter clean_state_dict_for_safetensors convert_dict_to_env_variables convert_file_size_to_int
        dtype_byte_size get_cpu_distributed_information get_grad_scaler get_mixed_precision_context_manager
        get_module_children_bottom_up load_accelerator_state load_custom_state load_state_dict move_to_device
        patch_optimizer_step save_accelerator_state save_custom_state""",
}
"""The way out, and the names that it is the way out of."""


class _Refused(type):
    """The type of names that raise on use. They are classes, so that `isinstance` and annotations work."""

    way_out: str

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(cls._message())

    def __getattr__(cls, name: str) -> Any:
        # An AttributeError, so that `hasattr` and libraries that look around are answered.
        raise AttributeError(cls._message())

    def _message(cls) -> str:
        return f"{cls.__name__} has no counterpart in notebook_launcher.compat. {cls.way_out}"


NAMES = {
    name: _Refused(name, (), {"way_out": way_out, "__module__": __name__})
    for way_out, names in REFUSED.items()
    for name in names.split()
}

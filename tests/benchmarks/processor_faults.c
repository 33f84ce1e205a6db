/* Faults of a worker on a processor, for proof_faults.py: LLAMA_FAULT names what is computed wrong.
 *
 * Include this file in ggml/src/ggml-cpu/ggml-cpu.c before ggml_graph_compute_thread, which then calls fault_begins(node) before a node is computed and
 * fault_ends(node) after it. The worker computes with one thread, so nothing else changes the values meanwhile.
 * f32 is no fault: products use exact weights and activations, as a device does that quantises no activations.
 */

static const char * fault_name(void) {
    static const char * name = NULL;
    if (!name) {
        name = getenv("LLAMA_FAULT");
        name = name ? name : "";
    }
    return name;
}

static bool fault_is(const char * name) { return strcmp(fault_name(), name) == 0; }

/* The number after a fault's name, as in rms_1.05 or norm_skip-9, or 0 for another fault. */
static float fault_number(const char * name) {
    const size_t length = strlen(name);
    return strncmp(fault_name(), name, length) == 0 ? (float) atof(fault_name() + length) : 0.0f;
}

static int32_t fault_kept[GGML_MAX_OP_PARAMS / sizeof(int32_t)];

static float fault_value(const struct ggml_tensor * tensor, int64_t row, int64_t head, int64_t column) {
    const char * data = (const char *) tensor->data + row * tensor->nb[1] + head * tensor->nb[2];
    if (tensor->type == GGML_TYPE_F16) { return GGML_FP16_TO_FP32(((const ggml_fp16_t *) data)[column]); }
    if (tensor->type == GGML_TYPE_F32) { return ((const float *) data)[column]; }
    const struct { ggml_fp16_t scale; int8_t values[32]; } * block = (const void *) data; /* q8_0 */
    return GGML_FP16_TO_FP32(block[column / 32].scale) * block[column / 32].values[column % 32];
}

/* Attention by its definition, with a fault. */
static void fault_attention(struct ggml_tensor * dst) {
    const struct ggml_tensor * q = dst->src[0], * k = dst->src[1], * v = dst->src[2], * mask = dst->src[3];
    const int64_t width = k->ne[0], keys = k->ne[1], heads = q->ne[2], group = heads / k->ne[2], out = v->ne[0];
    const float scale = ((const float *) dst->op_params)[0];
    const bool damaged = fault_is("cache_q8") && k->type == GGML_TYPE_Q8_0;
    float * scores = malloc(keys * sizeof(float));
    float * row = malloc((width > out ? width : out) * sizeof(float));
    for (int64_t head = 0; head < heads; ++head) {
        int64_t source = head / group;
        if (fault_is("kv_head")) { source = (source + 1) % k->ne[2]; }
        for (int64_t token = 0; token < q->ne[1]; ++token) {
            const float * query = (const float *) ((const char *) q->data + token * q->nb[1] + head * q->nb[2]);
            const ggml_fp16_t * seen = mask ? (const ggml_fp16_t *) ((const char *) mask->data + token * mask->nb[1]) : NULL;
            int64_t last = keys - 1;
            while (seen && last > 0 && GGML_FP16_TO_FP32(seen[last]) == -INFINITY) { --last; }
            float most = -INFINITY;
            for (int64_t key = 0; key <= last; ++key) {
                const float hidden = seen && !fault_is("window") ? GGML_FP16_TO_FP32(seen[key]) : 0.0f;
                float sum = 0.0f;
                if (hidden == -INFINITY) { scores[key] = -INFINITY; continue; }
                for (int64_t column = damaged ? 32 : 0; column < width; ++column) { sum += query[column] * fault_value(k, key, source, column); }
                scores[key] = sum * scale + hidden;
                most = scores[key] > most ? scores[key] : most;
            }
            if (fault_is("softmax")) { most = 0.0f; }
            float total = 0.0f;
            memset(row, 0, out * sizeof(float));
            for (int64_t key = 0; key <= last; ++key) {
                float weight = expf(scores[key] - most);
                if (fault_is("softmax")) { weight = GGML_FP16_TO_FP32(GGML_FP32_TO_FP16(weight)); } /* as kernels that keep it in half precision */
                if (weight == 0.0f) { continue; }
                total += weight;
                for (int64_t column = 0; column < out; ++column) { row[column] += weight * fault_value(v, key, source, column); }
            }
            int64_t place = head;
            if (fault_is("heads") && head < 2) { place = 1 - head; }
            float * target = (float *) ((char *) dst->data + place * dst->nb[1] + token * dst->nb[2]);
            for (int64_t column = 0; column < out; ++column) { target[column] = row[column] / total; }
        }
    }
    free(scores);
    free(row);
}

/* A product whose first block of each row counts `factor` times, or one with exact weights and activations. */
static void fault_product(struct ggml_tensor * dst, float factor, bool exact) {
    const struct ggml_tensor * weights = dst->src[0], * input = dst->src[1];
    if (!ggml_is_quantized(weights->type) || input->type != GGML_TYPE_F32) { return; }
    const int64_t columns = exact ? weights->ne[0] : ggml_blck_size(weights->type), rows = weights->ne[1];
    float * row = malloc(columns * sizeof(float));
    for (int64_t index = 0; index < rows * weights->ne[2]; ++index) {
        const int64_t line = index % rows, matrix = index / rows;
        ggml_get_type_traits(weights->type)->to_float((const char *) weights->data + line * weights->nb[1] + matrix * weights->nb[2], row, columns);
        for (int64_t token = 0; token < input->ne[1]; ++token) {
            const float * values = (const float *) ((const char *) input->data + token * input->nb[1] + matrix * input->nb[2]);
            float * target = (float *) ((char *) dst->data + token * dst->nb[1] + matrix * dst->nb[2]) + line;
            float sums[16] = {0};
            for (int64_t column = 0; column < columns; column += 16) {
                for (int lane = 0; lane < 16; ++lane) { sums[lane] += row[column + lane] * values[column + lane]; }
            }
            float sum = 0.0f;
            for (int lane = 0; lane < 16; ++lane) { sum += sums[lane]; }
            *target = exact ? sum : *target + (factor - 1.0f) * sum;
        }
    }
    free(row);
}

static void fault_scale(struct ggml_tensor * dst, float factor) {
    for (int64_t index = 0; factor != 0.0f && index < ggml_nelements(dst); ++index) { ((float *) dst->data)[index] *= factor; }
}

static void fault_begins(struct ggml_tensor * node) {
    float * numbers = (float *) node->op_params;
    memcpy(fault_kept, node->op_params, sizeof(fault_kept));
    if (node->op == GGML_OP_ROPE && fault_is("rope_none")) { memset(node->src[1]->data, 0, ggml_nbytes(node->src[1])); }
    if (node->op == GGML_OP_ROPE && fault_is("rope_base")) { numbers[5] = 10000.0f; }
    if (node->op == GGML_OP_FLASH_ATTN_EXT && fault_number("attention_") != 0.0f) { numbers[0] *= fault_number("attention_"); }
    if (node->op == GGML_OP_RMS_NORM && fault_is("epsilon")) { numbers[0] *= 10.0f; }
}

static void fault_ends(struct ggml_tensor * node) {
    memcpy(node->op_params, fault_kept, sizeof(fault_kept));
    if (node->op == GGML_OP_RMS_NORM) {
        const char * layer = strrchr(node->name, '-');
        fault_scale(node, fault_number("rms_"));
        if (strncmp(fault_name(), "norm_skip", 9) == 0 && layer && strcmp(layer, fault_name() + 9) == 0 && ggml_is_contiguous(node->src[0])) {
            memcpy(node->data, node->src[0]->data, ggml_nbytes(node));
        }
    }
    if (node->op == GGML_OP_MUL) { fault_scale(node, fault_number("mul_")); }
    if (node->op == GGML_OP_GLU) {
        const struct ggml_tensor * gate = node->src[0], * up = node->src[1];
        fault_scale(node, fault_number("glu_"));
        for (int64_t index = 0; fault_is("clamp") && up && index < ggml_nelements(node); ++index) {
            const int64_t row = index / node->ne[0], column = index % node->ne[0];
            const float x = ((const float *) ((const char *) gate->data + row * gate->nb[1]))[column];
            if (x > 4.0f) {
                ((float *) node->data)[index] = (ggml_get_glu_op(node) == GGML_GLU_OP_SWIGLU ? 4.0f / (1.0f + expf(-4.0f)) : 4.0f) *
                    ((const float *) ((const char *) up->data + row * up->nb[1]))[column];
            }
        }
    }
    if (node->op == GGML_OP_MUL_MAT && fault_is("f32")) { fault_product(node, 1.0f, true); }
    if (node->op == GGML_OP_MUL_MAT && fault_is("block_drop")) { fault_product(node, 0.0f, false); }
    if (node->op == GGML_OP_MUL_MAT && fault_number("block_") != 0.0f) { fault_product(node, fault_number("block_"), false); }
    if (node->op == GGML_OP_FLASH_ATTN_EXT && (fault_is("heads") || fault_is("kv_head") || fault_is("softmax") || fault_is("window") || fault_is("cache_q8"))) {
        fault_attention(node);
    }
}

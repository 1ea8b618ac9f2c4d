// What the kernels' inline PTX does, one function an instruction; host_kernels.py turns each asm statement into a call.
#pragma once
#include "simt.h"

inline float half_value(unsigned bits) { const uint16_t low = uint16_t(bits); _Float16 value; memcpy(&value, &low, 2); return value; }
inline unsigned half_bits_of(float value) { const _Float16 rounded = _Float16(value); uint16_t bits; memcpy(&bits, &rounded, 2); return bits; }

inline void ptx_cvt_f32_f16(float& value, unsigned bits) { value = half_value(bits); }
inline void ptx_cvt_rn_f16_f32(uint16_t& bits, float value) { bits = uint16_t(half_bits_of(value)); }
inline void ptx_cvt_rn_bf16_f32(uint16_t& bits, float value) {
    const unsigned all = __float_as_uint(value);
    bits = uint16_t((all + 0x7fff + (all >> 16 & 1)) >> 16);
}
inline void ptx_prefetch_global_L2(const void* at) { (void)*static_cast<const volatile char*>(at); }  // so that it must exist
inline void ptx_lop3_b32(unsigned& d, unsigned a, unsigned b, unsigned c) { d = (a & b) ^ c; }  // 0x6a, the only one that is used
inline void ptx_vabsdiff4_u32_u32_u32_add(unsigned& d, unsigned a, unsigned b, unsigned c) {
    d = c;
    for (int i = 0; i < 32; i += 8) d += std::abs(int(a >> i & 255) - int(b >> i & 255));
}
inline void ptx_mad_lo_u32(unsigned& d, unsigned a, unsigned b, unsigned c) { d = a * b + c; }
inline void ptx_fma_rn_f16x2(unsigned& d, unsigned a, unsigned b, unsigned c) {
    const auto one = [](unsigned x, unsigned y, unsigned z) { return half_bits_of(float(double(half_value(x)) * half_value(y) + half_value(z))); };
    d = one(a, b, c) | one(a >> 16, b >> 16, c >> 16) << 16;
}
inline void ptx_add_rn_f16x2(unsigned& d, unsigned a, unsigned b) {
    d = half_bits_of(half_value(a) + half_value(b)) | half_bits_of(half_value(a >> 16) + half_value(b >> 16)) << 16;
}
inline void ptx_mul_rn_f16x2(unsigned& d, unsigned a, unsigned b) {
    d = half_bits_of(half_value(a) * half_value(b)) | half_bits_of(half_value(a >> 16) * half_value(b >> 16)) << 16;
}
inline void ptx_ex2_approx_ftz_f32(float& d, float a) { d = std::exp2(a); }
inline void ptx_lg2_approx_ftz_f32(float& d, float a) { d = std::log2(a); }
inline void ptx_rcp_approx_ftz_f32(float& d, float a) { d = 1.0f / a; }
template <int = 0> inline void ptx_setmaxnreg_dec_sync_aligned_u32() {}
template <int = 0> inline void ptx_setmaxnreg_inc_sync_aligned_u32() {}
inline void ptx_min_NaN_f32(float& d, float a, float b) { d = a != a ? a : b != b ? b : std::min(a, b); }
inline void ptx_max_NaN_f32(float& d, float a, float b) { d = a != a ? a : b != b ? b : std::max(a, b); }
inline void ptx_add_rn_f16(uint16_t& d, unsigned a, unsigned b) { d = uint16_t(half_bits_of(half_value(a) + half_value(b))); }
inline void ptx_mov_b32(uint16_t& low, uint16_t& high, unsigned word) { low = uint16_t(word), high = uint16_t(word >> 16); }
inline void ptx_mov_b32(unsigned& word, uint16_t low, uint16_t high) { word = low | unsigned(high) << 16; }
inline bool waits_in_order = false;
inline thread_local bool waited[MAX_THREADS];  // whether every thread is to wait before it lets the next launch begin
inline void ptx_griddepcontrol_wait() { waited[running] = true; }
inline void ptx_griddepcontrol_launch_dependents() {
    if (waits_in_order && !waited[running]) stop("the next launch may begin before this one waited");
}

inline void ptx_ld_shared_u32(unsigned& d, unsigned at) { memcpy(&d, shared_bytes(at, 4), 4); }
inline void ptx_ld_shared_v2_u32(unsigned& a, unsigned& b, unsigned at) { shared_bytes(at, 8), ptx_ld_shared_u32(a, at), ptx_ld_shared_u32(b, at + 4); }
inline void ptx_ld_shared_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned at) {
    shared_bytes(at, 16), ptx_ld_shared_v2_u32(a, b, at), ptx_ld_shared_v2_u32(c, d, at + 8);
}
inline void ptx_ld_shared_v4_f32(float& a, float& b, float& c, float& d, unsigned at) {
    const unsigned char* from = shared_bytes(at, 16);
    memcpy(&a, from, 4), memcpy(&b, from + 4, 4), memcpy(&c, from + 8, 4), memcpy(&d, from + 12, 4);
}
inline void ptx_st_shared_f32(unsigned at, float value) { memcpy(shared_bytes(at, 4), &value, 4); }
inline void ptx_st_shared_u16(unsigned at, uint16_t value) { memcpy(shared_bytes(at, 2), &value, 2); }

// Copies land as late as they may: when their thread waits for them.
struct Copy { unsigned target; const void* source; unsigned size; };
inline thread_local std::vector<Copy> open_copies[MAX_THREADS];
inline thread_local std::vector<std::vector<Copy>> closed_copies[MAX_THREADS];
inline void start_copy_of(unsigned target, const void* source, unsigned size) {
    if (reinterpret_cast<uintptr_t>(source) % size) stop("alignment of a copy's source");
    open_copies[running].push_back({target, source, size});
}
inline void commit_copies() { closed_copies[running].push_back(std::move(open_copies[running])), open_copies[running].clear(); }
inline void wait_for_copy_groups(unsigned left) {
    auto& groups = closed_copies[running];
    while (groups.size() > left) {
        for (const Copy& copy : groups.front())
            copy.source ? memcpy(shared_bytes(copy.target, copy.size), copy.source, copy.size) : memset(shared_bytes(copy.target, copy.size), 0, copy.size);
        groups.erase(groups.begin());
    }
}
inline void ptx_movmatrix_sync_aligned_m8n8_trans_b16(unsigned& result, unsigned word) {
    // Lane 4i + j has elements 2j and 2j + 1 of row i; of the transpose's.
    const auto element = [](auto& all, int row, int column) { return all[4 * row + column / 2] >> 16 * (column % 2) & 0xffffu; };
    result = collect(word, [&](auto& all, int lane) {
        return element(all, lane % 4 * 2, lane / 4) | element(all, lane % 4 * 2 + 1, lane / 4) << 16;
    });
}
inline void ptx_ld_global_nc_u32(unsigned& d, const unsigned* at) { d = *at; }
inline void ptx_ld_global_nc_v2_u32(unsigned& a, unsigned& b, const unsigned* at) { a = at[0], b = at[1]; }
inline void ptx_ld_global_nc_L1__no_allocate_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d, const unsigned* at) {
    a = at[0], b = at[1], c = at[2], d = at[3];
}

inline void ptx_fence_proxy_async_shared__cta() {}
inline void ptx_st_shared_u32(unsigned at, unsigned value) { memcpy(shared_bytes(at, 4), &value, 4); }
inline void ptx_st_shared_v2_u32(unsigned at, unsigned a, unsigned b) { shared_bytes(at, 8), ptx_st_shared_u32(at, a), ptx_st_shared_u32(at + 4, b); }
inline void ptx_st_shared_v4_u32(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
    shared_bytes(at, 16), ptx_st_shared_v2_u32(at, a, b), ptx_st_shared_v2_u32(at + 8, c, d);
}
// Blocks may run at once, each in a thread of the host.
inline void ptx_fence_acq_rel_gpu() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline unsigned loaded(const void* at) { return __atomic_load_n(static_cast<const unsigned*>(at), __ATOMIC_ACQUIRE); }
inline void stored(void* at, unsigned word) { __atomic_store_n(static_cast<unsigned*>(at), word, __ATOMIC_RELEASE); }
inline unsigned exchanged(unsigned* at, const std::function<unsigned(unsigned)>& next) {
    unsigned before = loaded(at);
    while (!__atomic_compare_exchange_n(at, &before, next(before), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    return before;
}
inline void ptx_st_relaxed_gpu_global_f32(float* at, float value) { stored(at, __float_as_uint(value)); }
inline void ptx_ld_relaxed_gpu_global_u32(unsigned& d, const unsigned* at) { d = loaded(at); }
inline void ptx_ld_acquire_gpu_global_u32(unsigned& d, const unsigned* at) { d = loaded(at); }
inline void ptx_ld_relaxed_gpu_global_v4_f32(float& a, float& b, float& c, float& d, const float4* at) {
    a = __uint_as_float(loaded(&at->x)), b = __uint_as_float(loaded(&at->y)), c = __uint_as_float(loaded(&at->z)), d = __uint_as_float(loaded(&at->w));
}
inline void ptx_atom_relaxed_gpu_global_cas_b32(unsigned& before, unsigned* at, unsigned expected, unsigned wanted) {
    before = exchanged(at, [=](unsigned now) { return now == expected ? wanted : now; });
}
inline void ptx_atom_acquire_gpu_global_inc_u32(unsigned& before, unsigned* at, unsigned last) {
    before = exchanged(at, [=](unsigned now) { return now >= last ? 0 : now + 1; });
}
inline void ptx_atom_acq_rel_gpu_global_add_u32(unsigned& before, unsigned* at, unsigned more) {
    before = exchanged(at, [=](unsigned now) { return now + more; });
}
inline void ptx_atom_acq_rel_gpu_global_or_b32(unsigned& before, unsigned* at, unsigned bits) {
    before = exchanged(at, [=](unsigned now) { return now | bits; });
}


// Instructions that nothing runs here.
template <class... Operands> inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(Operands&&...) { stop("ldmatrix"); }
template <class... Operands> inline void ptx_barrier_cluster_arrive_release_aligned(Operands&&...) { stop("clusters"); }
template <class... Operands> inline void ptx_barrier_cluster_wait_acquire_aligned(Operands&&...) { stop("clusters"); }

// A lane's A and B registers of m16n8k16 (two values a word) or m16n8k32 (four), and its four sums from all lanes' registers.
struct MmaOperands { unsigned a[4], b[2]; };
inline thread_local MmaOperands mma_operands[MAX_THREADS / 32][32];

template <int PER_WORD, class T, class Product>
inline void multiply(T* const (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const T (&c)[4], const Product& product) {
    MmaOperands(&lanes)[32] = mma_operands[running / 32];
    const int lane = running % 32, g = lane / 4, q = lane % 4;
    for (int i = 0; i < 4; ++i) lanes[lane].a[i] = a[i];
    lanes[lane].b[0] = b[0], lanes[lane].b[1] = b[1];
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        const int row = g + 8 * (i / 2), column = 2 * q + i % 2;
        T sum = c[i];
        for (int k = 0; k < 8 * PER_WORD; ++k) {
            const int half = k / (4 * PER_WORD), word = k % (4 * PER_WORD) / PER_WORD, part = k % PER_WORD;
            sum += product(lanes[row % 8 * 4 + word].a[row / 8 + 2 * half], lanes[column * 4 + word].b[half], part);
        }
        *d[i] = sum;
    }
    __syncwarp();
}
inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2,
    unsigned a3, unsigned b0, unsigned b1, float c0, float c1, float c2, float c3) {
    multiply<2, float>({&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3},
                       [](unsigned a, unsigned b, int part) { return half_value(a >> 16 * part) * half_value(b >> 16 * part); });
}
inline void ptx_mma_sync_aligned_m16n8k32_row_col_s32_u8_s8_s32(int& d0, int& d1, int& d2, int& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
    unsigned b0, unsigned b1, int c0, int c1, int c2, int c3) {
    multiply<4, int>({&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3},
                     [](unsigned a, unsigned b, int part) { return int(a >> 8 * part & 255) * int(int8_t(b >> 8 * part)); });
}

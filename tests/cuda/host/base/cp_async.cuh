// Asynchronous copies on the host: they land when they are waited for.
#pragma once
#include "base/types.cuh"

inline void cp_async_16(u32 target, const void* source) { start_copy_of(target, source, 16); }
inline void cp_async_16(u32 target, const void* source, u32 bytes) { start_copy_of(target, bytes ? source : nullptr, 16); }
inline void cp_async_8(u32 target, const void* source) { start_copy_of(target, source, 8); }
inline void cp_async_4(u32 target, const void* source) { start_copy_of(target, source, 4); }
inline void cp_async_commit() { commit_copies(); }
template <int PENDING> inline void cp_async_wait() { wait_for_copy_groups(PENDING); }
inline void cp_async_wait_all() { commit_copies(), wait_for_copy_groups(0); }

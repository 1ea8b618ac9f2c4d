// The accumulators of one wgmma, for the widths that the kernels use: their names in the instruction, and their operands, which
// inline PTX wants one by one. base/wgmma.cuh and base/wgmma_int8.cuh make the instructions of them.
#pragma once
#define WGMMA_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_NAMES_12 WGMMA_NAMES_8 ", %8, %9, %10, %11"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_20 WGMMA_NAMES_16 ", %16, %17, %18, %19"
#define WGMMA_NAMES_24 WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_NAMES_28 WGMMA_NAMES_24 ", %24, %25, %26, %27"
#define WGMMA_NAMES_32 WGMMA_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_56 WGMMA_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_72 WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_NAMES_80 WGMMA_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_88 WGMMA_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_NAMES_96 WGMMA_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_104 WGMMA_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_NAMES_112 WGMMA_NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_NAMES_120 WGMMA_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_NAMES_128 WGMMA_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

// C: the constraint, such as "+f".
#define WGMMA_SUMS_8(C) C(d[0]), C(d[1]), C(d[2]), C(d[3]), C(d[4]), C(d[5]), C(d[6]), C(d[7])
#define WGMMA_SUMS_12(C) WGMMA_SUMS_8(C), C(d[8]), C(d[9]), C(d[10]), C(d[11])
#define WGMMA_SUMS_16(C) WGMMA_SUMS_8(C), C(d[8]), C(d[9]), C(d[10]), C(d[11]), C(d[12]), C(d[13]), C(d[14]), C(d[15])
#define WGMMA_SUMS_20(C) WGMMA_SUMS_16(C), C(d[16]), C(d[17]), C(d[18]), C(d[19])
#define WGMMA_SUMS_24(C) WGMMA_SUMS_16(C), C(d[16]), C(d[17]), C(d[18]), C(d[19]), C(d[20]), C(d[21]), C(d[22]), C(d[23])
#define WGMMA_SUMS_28(C) WGMMA_SUMS_24(C), C(d[24]), C(d[25]), C(d[26]), C(d[27])
#define WGMMA_SUMS_32(C) WGMMA_SUMS_24(C), C(d[24]), C(d[25]), C(d[26]), C(d[27]), C(d[28]), C(d[29]), C(d[30]), C(d[31])
#define WGMMA_SUMS_40(C) WGMMA_SUMS_32(C), C(d[32]), C(d[33]), C(d[34]), C(d[35]), C(d[36]), C(d[37]), C(d[38]), C(d[39])
#define WGMMA_SUMS_48(C) WGMMA_SUMS_40(C), C(d[40]), C(d[41]), C(d[42]), C(d[43]), C(d[44]), C(d[45]), C(d[46]), C(d[47])
#define WGMMA_SUMS_56(C) WGMMA_SUMS_48(C), C(d[48]), C(d[49]), C(d[50]), C(d[51]), C(d[52]), C(d[53]), C(d[54]), C(d[55])
#define WGMMA_SUMS_64(C) WGMMA_SUMS_56(C), C(d[56]), C(d[57]), C(d[58]), C(d[59]), C(d[60]), C(d[61]), C(d[62]), C(d[63])
#define WGMMA_SUMS_72(C) WGMMA_SUMS_64(C), C(d[64]), C(d[65]), C(d[66]), C(d[67]), C(d[68]), C(d[69]), C(d[70]), C(d[71])
#define WGMMA_SUMS_80(C) WGMMA_SUMS_72(C), C(d[72]), C(d[73]), C(d[74]), C(d[75]), C(d[76]), C(d[77]), C(d[78]), C(d[79])
#define WGMMA_SUMS_88(C) WGMMA_SUMS_80(C), C(d[80]), C(d[81]), C(d[82]), C(d[83]), C(d[84]), C(d[85]), C(d[86]), C(d[87])
#define WGMMA_SUMS_96(C) WGMMA_SUMS_88(C), C(d[88]), C(d[89]), C(d[90]), C(d[91]), C(d[92]), C(d[93]), C(d[94]), C(d[95])
#define WGMMA_SUMS_104(C) WGMMA_SUMS_96(C), C(d[96]), C(d[97]), C(d[98]), C(d[99]), C(d[100]), C(d[101]), C(d[102]), C(d[103])
#define WGMMA_SUMS_112(C) WGMMA_SUMS_104(C), C(d[104]), C(d[105]), C(d[106]), C(d[107]), C(d[108]), C(d[109]), C(d[110]), C(d[111])
#define WGMMA_SUMS_120(C) WGMMA_SUMS_112(C), C(d[112]), C(d[113]), C(d[114]), C(d[115]), C(d[116]), C(d[117]), C(d[118]), C(d[119])
#define WGMMA_SUMS_128(C) WGMMA_SUMS_120(C), C(d[120]), C(d[121]), C(d[122]), C(d[123]), C(d[124]), C(d[125]), C(d[126]), C(d[127])

// D += A·B: SUMS registers of D, numbered from %0 on, four of A from %SUMS on, B's descriptor. INSTRUCTION is what stands behind
// wgmma.mma_async.sync.aligned, LAST what it wants behind its operands.
#define WGMMA_RUN(INSTRUCTION, LAST, C, SUMS, A1, A2, A3, B) WGMMA_RUN_IF("eq", INSTRUCTION, LAST, C, SUMS, A1, A2, A3, B)
// The same, and with "ne" D = A·B.
#define WGMMA_RUN_IF(COMPARISON, INSTRUCTION, LAST, C, SUMS, A1, A2, A3, B) \
    asm volatile( \
        "{\n.reg .pred accumulate;\nsetp." COMPARISON ".u32 accumulate, 0, 0;\n" \
        "wgmma.mma_async.sync.aligned." INSTRUCTION " {" WGMMA_NAMES_##SUMS "}, {%" #SUMS ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", accumulate" LAST ";\n}\n" \
        : WGMMA_SUMS_##SUMS(C) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

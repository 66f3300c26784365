//! The memory functions that compiled code calls by itself: `memcpy`, `memmove`, `memset`, `memcmp`, `bcmp`, `strlen`.
//!
//! The compiler turns copies and comparisons into calls of these names. Bound by the dynamic linker they would be the program's:
//! a sanitizer's interceptor, for one, reads shadow memory, which can be evicted, and the worker would wait for itself. So the
//! library brings them along, hidden: calls are bound when it is linked, and the program's own functions stay as they are.
//!
//! Written in assembly, since the compiler would turn a loop that copies into a call of `memcpy`. They use registers and the
//! caller's memory only. What the agent copies is short: messages and lists of ranges.
//!
//! # Safety
//! As the C library's functions of the same names.

#[cfg(panic = "abort")]
core::arch::global_asm!(
    ".hidden memcpy",
    ".hidden memmove",
    ".hidden memset",
    ".hidden memcmp",
    ".hidden bcmp",
    ".hidden strlen",
    ".globl memcpy",
    ".globl memmove",
    ".globl memset",
    ".globl memcmp",
    ".globl bcmp",
    ".globl strlen",
    // memmove(rdi: to, rsi: from, rdx: len): forwards, unless `to` lies in what has still to be read.
    ".type memcpy, @function",
    ".type memmove, @function",
    "memcpy:",
    "memmove:",
    "mov rax, rdi",
    "mov rcx, rdi",
    "sub rcx, rsi",
    "cmp rcx, rdx",
    "mov rcx, rdx",
    "jb 2f",
    "rep movsb",
    "ret",
    "2:",
    "lea rdi, [rdi + rdx - 1]",
    "lea rsi, [rsi + rdx - 1]",
    "std",
    "rep movsb",
    "cld",
    "ret",
    // memset(rdi: to, sil: byte, rdx: len)
    ".type memset, @function",
    "memset:",
    "mov r8, rdi",
    "mov eax, esi",
    "mov rcx, rdx",
    "rep stosb",
    "mov rax, r8",
    "ret",
    // memcmp(rdi, rsi, rdx: len): the difference of the first bytes that differ.
    ".type memcmp, @function",
    ".type bcmp, @function",
    "memcmp:",
    "bcmp:",
    "xor eax, eax",
    "mov rcx, rdx",
    "test rcx, rcx",
    "jz 3f",
    "repe cmpsb",
    "movzx eax, byte ptr [rdi - 1]",
    "movzx ecx, byte ptr [rsi - 1]",
    "sub eax, ecx",
    "neg eax",
    "3:",
    "ret",
    // strlen(rdi)
    ".type strlen, @function",
    "strlen:",
    "xor eax, eax",
    "4:",
    "cmp byte ptr [rdi + rax], 0",
    "je 5f",
    "inc rax",
    "jmp 4b",
    "5:",
    "ret",
);

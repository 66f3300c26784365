//! What connections of processes can say before they are a session, in any order: each message comes to what the protocol says, and
//! nothing is left when they end.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use uzswap_manager::fuzzing::{Protocol, TOKENS, decode};

#[derive(Debug, Arbitrary)]
enum Step {
    Connect,
    Say { which: u8, message: Message },
    Hear { which: u8 },
    Leave { which: u8 },
}

#[derive(Debug, Arbitrary)]
enum Message {
    Call { own: bool },
    CallWith { version: u64, token: u64 },
    Failed { step: u64, errno: u64 },
    /// A HELLO whose areas are whole pages.
    Hello { flags: u8, nonce: [u64; 2], pages: [u32; 5] },
    Advise { own: bool, advice: u8, address: u64, len: u64 },
    Any { kind: u8, words: Vec<u64> },
}

impl Message {
    fn words(&self) -> Vec<u64> {
        let token = |own: bool| TOKENS[usize::from(!own)];
        match self {
            Message::Call { own } => uzswap_proto::call(token(*own)).to_vec(),
            Message::CallWith { version, token } => vec![uzswap_proto::kind::CALL, *version, *token],
            Message::Failed { step, errno } => vec![uzswap_proto::kind::FAILED, *step, *errno],
            Message::Hello { flags, nonce, pages } => {
                let pages = pages.map(|page| u64::from(page) << 12);
                [&[uzswap_proto::kind::HELLO, u64::from(*flags)][..], nonce, &pages].concat()
            }
            Message::Advise { own, advice, address, len } => {
                vec![uzswap_proto::kind::ADVISE, uzswap_proto::VERSION, token(*own), u64::from(*advice), *address, *len]
            }
            Message::Any { kind, words } => [&[u64::from(*kind)][..], words].concat(),
        }
    }
}

fuzz_target!(|steps: Vec<Step>| {
    let mut protocol = Protocol::new();
    for step in steps {
        match step {
            Step::Connect => protocol.connect(),
            Step::Say { which, message } => {
                let words = message.words();
                decode(&words);
                protocol.say(which.into(), &words);
            }
            Step::Hear { which } => protocol.hear(which.into()),
            Step::Leave { which } => protocol.leave(which.into()),
        }
    }
    protocol.end();
});

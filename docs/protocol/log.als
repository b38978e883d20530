module log
open util/ordering[Num] as number
/* The log of a dataset; docs/protocol.md has the rules in words. A step is one request to the store, or several reads
   which no other order could tell from one (docs/protocol.md, "What was checked"). A process that is never scheduled
   again has crashed; one that is scheduled late has paused. There is no clock, so nothing here can hang on one (C5).
   A rule that a command does not mention has the scope 0, that is: the rule is on. `1 Job` is a job of any kind. */

sig Num {} abstract sig Path {} one sig X, Y extends Path {}   -- numbers of the log; paths
abstract sig Job {}                             -- one wish, one commit; one process works on it, or more
sig Put extends Job { at: one Path }            -- a new object at a path; with a new KEK: a rotation of the KEK
sig Rename extends Job {}                       -- what is at X goes to Y
sig Restore extends Job { version: one Num }    -- the files of a kept version come back
sig Kek {}
sig Obj { owner: lone Writer, kek: lone Kek }   -- a file or a table; no owner: there from the beginning
sig Entry {                                     -- the body of an entry; two requests for one number have two bodies
  num, first: one Num, by: lone Job, snap: Path -> lone Obj, committed, ended: set Job,
  keys, old: set Kek                            -- old: the KEKs that the old master key version wraps
}
sig Gone in Entry {}                            -- the old master key version is `gone`
sig Back in Entry {}                            -- the entry brought files of an older version back
sig Before in Entry {}                          -- what the log has been before the first step
/* Rules that a variant leaves out: `exactly 1 NoNames` in the scope of a command. */
sig NoNames, NoPlanFirst, NoPlanOnce, NoOverCheck, NoPlanCheck, NoPlanAfter, NoKeks, NoKept, NoAnew, NoMark, NoDrop, NoLook,
  NoUnknown, NoGiveUp, NoAbort, NoCandidatesFirst, NoPlansThenHead, NoWhole, NoStrays, NoHasPlan, NoKeptNames, NoBack, NoAncestors, NoExpiryPlans, NoTrim, NoDecide,
  NoFence, NoPast, NoRelook, NoKekKept, NoKekOwn, NoExtPut, NoExtOrder, NoExtHead, NoUnder, NoGoneCheck, NoGoneEntry, NoGoneHead {}
/* The store. `flight`: creates that were sent; they land later, or never. `truth`: what the log was, for the claims only. */
var sig log, flight, truth in Entry {} var sig objs, ever in Obj {} var sig plans, latePlans in Job {}
var sig rows, oldWrap in Kek {}                 -- the external key store; new KEKs that were wrapped under the old version
abstract sig Pc {} one sig Start, Bare, Ready, Asked, Quit, Rows, D1, D2, D3, D4, Done extends Pc {}   -- where a process is
abstract sig Answer {} one sig Yes, No, Maybe extends Answer {}
abstract sig Proc { var pc: one Pc, var made, seen: lone Entry, var told: lone Answer, var cand: set Obj, var saw: set Job }
sig Writer extends Proc { job: one Job, newKek: lone Kek }  -- newKek: the KEK that this process, and no other, may make (rule 9)
sig Expirer, Sweeper, Master extends Proc {}    -- Master turns the master key
fun over[e: Entry]: set Job { e.committed + e.ended }
fun top[es: set Entry]: lone Entry { { e: es | no x: es | gt[x.num, e.num] } }
fun head: lone Entry { top[log] }
fun kept[e: Entry]: set Num { { n: Num | gte[n, e.first] and lte[n, e.num] } }
fun versions[e: Entry]: set Entry { { x: truth | x.num in kept[e] } }
fun few[e: Entry]: set Entry { e + { x: versions[e] | x.num = e.first or (no NoBack and x in Back) } } -- all that an expiry reads
fun older[n: Num]: set Obj { { x: truth | lt[x.num, n] }.snap[Path] }   -- what ancestors below a number name
fun own[j: set Job]: set Obj { owner.(job.j) }
fun below[n: Num]: set Entry { { e: log | lt[e.num, n] } }
fun news[w: Writer]: set Kek { (job.(w.job)).newKek }   -- the new KEKs of all processes of a job: its commit may bring them
fun left: set Job { no NoDrop => plans else none }      -- who stays in `over`: rule 3f
pred waits[w: Writer] { some e: flight | e.by = w.job and gt[e.num, head.num] }
-- Frames
pred world[f: set Entry, o: set Obj, p: set Job, r: set Kek] {
  log' = log and truth' = truth and flight' = f and objs' = o and ever' = ever + o and plans' = p and rows' = r
}
pred aside { latePlans' = latePlans and oldWrap' = oldWrap }
pred calm { world[flight, objs, plans, rows] and aside }
pred send[e: Entry] { world[flight + e, objs, plans, rows] and aside }
pred still[ps: set Proc] {
  all q: ps | q.pc' = q.pc and q.made' = q.made and q.seen' = q.seen and q.told' = q.told and q.cand' = q.cand and q.saw' = q.saw
}
pred to[p: Proc, c: Pc, m: lone Entry, t: lone Answer, k: set Obj, s: set Job, h: lone Entry] {
  p.pc' = c and p.made' = m and p.seen' = h and p.told' = t and p.cand' = k and p.saw' = s and still[Proc - p]
}
pred answer[w: Writer, c: Pc, t: Answer] { calm and to[w, c, w.made, t, w.cand, none, none] }
-- Steps of the store
pred land[e: Entry] {                           -- a create arrives; it is exclusive
  flight' = flight - e and objs' = objs and ever' = ever and plans' = plans and rows' = rows and aside and still[Proc]
  log' = ((some x: log | x.num = e.num) => log else log + e)
  truth' = ((e in log' and e.num = top[truth].num.next) => truth + e else truth)
}
pred landPlan {                                 -- the create of a plan arrives, late
  some j: latePlans - plans | plans' = plans + j and latePlans' = latePlans - j
  log' = log and truth' = truth and flight' = flight and objs' = objs and ever' = ever and rows' = rows and oldWrap' = oldWrap and still[Proc]
}
pred tidy {                                     -- whoever has read the head removes entries below `first`
  log' in log and some log - log' and log - log' in below[no NoTrim => head.first else head.num]
  truth' = truth and flight' = flight and objs' = objs and ever' = ever and plans' = plans and rows' = rows and aside and still[Proc]
}

-- Steps of a job's process
pred fresh[w: Writer, o: Obj] {                 -- rules 1 and 9
  o not in objs and ((o.owner = w and o not in ever) or (some NoNames and no o.owner))
  some Kek => (some o.kek and o.kek in head.keys + w.newKek) else no o.kek
}
pred makes[w: Writer, o: set Obj, p: set Job] { -- objects are written; the KEK's row before the entry that names the KEK (10)
  w.job in Put => (one o and fresh[w, o]) else no o
  world[flight, objs + o, p, no NoExtPut => rows + (o.kek & w.newKek) else rows]
  oldWrap in oldWrap' and oldWrap' in oldWrap + (head in Gone => none else o.kek & w.newKek)
}
pred begin[w: Writer, o: set Obj] {             -- rule 2: the plan, then the objects
  w.pc = (no NoPlanFirst => Start else Bare) and (job.(w.job) - w).pc in Start and w.job not in plans + latePlans
  no NoPlanFirst => makes[w, o, plans + w.job] else { world[flight, objs, plans + w.job, rows] and oldWrap' = oldWrap and o = w.cand }
  latePlans' = (no NoPlanOnce => latePlans else latePlans + w.job) and to[w, Ready, none, none, o, none, none]
}
pred bare[w: Writer, o: set Obj] {              -- only without PlanFirst: the objects, then the plan
  some NoPlanFirst and w.pc = Start and makes[w, o, plans] and latePlans' = latePlans and to[w, Bare, none, none, o, none, none]
}
pred beginLost[w: Writer] {                     -- no answer: it takes another id, and this one is nobody's
  w.pc = Start and (job.(w.job) - w).pc in Start and w.job not in plans + latePlans and world[flight, objs, plans, rows]
  latePlans' = latePlans + w.job and oldWrap' = oldWrap and to[w, Done, none, none, none, none, none]
}
pred resume[w: Writer, o: set Obj] {            -- a second process goes on with a job: with an object that is there, or with a new one
  w.pc = Start and w.job in plans and latePlans' = latePlans and to[w, Ready, none, none, o, none, none]
  { makes[w, o, plans] } or { calm and w.job in Put and one o and o in own[w.job] & objs }
}
pred again[w: Writer, o: set Obj] {             -- rule 3d: the KEK has left the head: another one, and wrap again
  w.pc in Ready + Asked and w.job in Put and w.job in plans
  some w.cand.kek - head.keys - (head in Gone => news[w] - oldWrap else news[w])
  makes[w, o, plans] and latePlans' = latePlans and to[w, Ready, w.made, none, o, none, none]
}
pred peek[w: Writer] {                          -- only without PlanAfter: looks for its plan before the head
  some NoPlanAfter and w.pc in Ready + Asked and no w.saw and w.job in plans and calm and to[w, w.pc, w.made, none, w.cand, w.job, none]
}
pred runs[w: Writer] {                          -- reads the head: the job is not over, its plan is there: rules 3a to 3c
  w.pc in Ready + Asked and (no NoOverCheck implies w.job not in over[head])
  w.job in (some NoPlanCheck => Job else some NoPlanAfter => w.saw else plans)
}
pred hears[w: Writer] {                          -- the head says what happened, or that nobody can know
  w.pc in Ready + Asked and no NoOverCheck
  w.job in head.committed and answer[w, Done, Yes] or w.job in head.ended and (answer[w, Done, No] or answer[w, Quit, No])
  or w.job not in over[head] + plans and no NoPlanCheck + NoPlanAfter and answer[w, Done, Maybe]
}
pred decided[w: Writer, e: Entry] {             -- rule 3d: what the wish makes of the head
  e in Back iff w.job in Restore
  (some NoAnew and some w.made.by) => e.snap = w.made.snap
  else w.job in Put => {
    some o: w.cand { e.snap = head.snap ++ (w.job.at -> o) and (no NoKeks implies o.kek in head.keys + news[w]) }
  } else w.job in Rename => { some head.snap[X] and e.snap = Y -> head.snap[X] }
  else {
    no NoKept implies w.job.version in kept[head]
    some r: log { r.num = w.job.version and e.snap = r.snap and (no NoKeks implies r.snap[Path].kek in head.keys) }
  }
}
pred next[e: Entry] { e not in log + flight + truth and e.num = head.num.next and gte[e.first, head.first] and lte[e.first, e.num] }
pred idleEntry[e: Entry] { next[e] and no e.by and e.snap = head.snap }     -- it changes no file
pred sameKeys[e: Entry] { e.keys = head.keys and e.old = head.old and (e in Gone iff head in Gone) }
pred inOver[e: Entry, c, x: set Job] { e.committed = (head.committed & left) + c and e.ended = (head.ended & left) + x }
pred commit[w: Writer, e: Entry] {              -- rule 3f: a create of head+1 is sent; it may raise `first`
  runs[w] and next[e] and decided[w, e] and e.by = w.job
  let mine = (e.snap[Path].kek & news[w]) - head.keys {
    e.keys = head.keys + mine and e.old = head.old + (mine & oldWrap) and (e in Gone iff head in Gone)
    head in Gone and no NoGoneCheck implies no mine & oldWrap
  }
  inOver[e, no NoMark => w.job else none, none] and send[e] and to[w, Asked, e, none, w.cand, none, none]
}
pred believe[w: Writer] {                       -- only without Look: takes "created" for "committed"
  some NoLook and w.pc = Asked and some w.made.by and w.made in log and answer[w, Done, Yes]
}
pred giveUp[w: Writer] {                        -- rule 4: no answer, and the number is free
  w.pc = Asked and waits[w] and w.job not in over[head]
  some NoUnknown => answer[w, Done, No] else answer[w, no NoGiveUp => Done else Quit, Maybe]
}
pred quit[w: Writer, e: Entry] {                -- rule 5: whoever gives up ends the job by an entry
  runs[w] and no NoAbort and idleEntry[e] and sameKeys[e] and e.first = head.first and inOver[e, none, w.job] and send[e]
  to[w, Asked, e, none, w.cand, none, none]
}
pred abort[w: Writer] { some NoAbort and runs[w] and not waits[w] and answer[w, Quit, No] }
pred drop[w: Writer] {                          -- after a "no" a process may delete its objects
  w.pc = Quit and world[flight, objs - owner.w, plans, rows] and aside and to[w, Done, w.made, w.told, w.cand, none, none]
}
pred finish[w: Writer] {                        -- its plan goes last
  w.pc = Done and some w.told & (Yes + No) and w.job in plans and world[flight, objs, plans - w.job, rows] and aside and still[Proc]
}

-- Steps of expiries and sweeps
pred expire[p: Expirer, e: Entry] {             -- rule 7; KEKs may leave: rule 9
  p.pc in Start + Asked + Done and idleEntry[e] and inOver[e, none, none] and (e in Gone iff head in Gone)
  e.keys in head.keys and e.old = head.old & e.keys and (gt[e.first, head.first] or e.keys != head.keys)
  (no NoKekKept => head + (log - below[e.first]) else head).snap[Path].kek in e.keys
  no NoDecide => world[flight + e, objs, plans, no NoExtOrder => rows else rows - (head.keys - e.keys)] else calm
  aside and to[p, no NoDecide => Asked else D1, e, none, none, none, none]
}
fun gone[p: Expirer]: set Kek { { x: truth | x.num.next = p.made.num }.keys - p.made.keys }
pred look[p: Expirer] { p.pc = Asked and calm and to[p, Rows, p.made, none, none, none, no NoExtHead => head else p.made & log] }
pred unput[p: Expirer] {                        -- rule 10: it has read the head; now it removes the rows of KEKs that are not there
  p.pc = Rows and some p.seen and world[flight, objs, plans, rows - (gone[p] - p.seen.keys)] and aside
  to[p, D1, p.made, none, none, none, none]
}
pred peekSweep[p: Sweeper] {                    -- only without Relook: silent jobs are listed before the head is read
  some NoRelook and p.pc = Start and no p.saw and calm and to[p, Start, none, none, none, plans, none]
}
pred sweep[p: Sweeper, e: Entry] {              -- rule 8: silent jobs go to `over` as ended
  p.pc in Start + Asked and no NoFence and idleEntry[e] and sameKeys[e] and e.first = head.first
  e.committed = head.committed & plans and head.ended & plans in e.ended
  e.ended in head.ended & plans + (no NoRelook => plans else p.saw) - head.committed and some e.ended - head.ended
  send[e] and to[p, Asked, e, none, none, plans, none]
}
pred bury[p: Sweeper] {                         -- plans of silent jobs that the head has in `over`
  p.pc in Start + Asked and plans' in plans and plans - plans' in (some NoFence => plans else over[no NoPast => head else p.made & log])
  world[flight, objs, plans', rows] and aside and to[p, D1, p.made, none, none, none, none]
}
-- Rule 6: candidates and plans, then the head with what its kept versions name, then delete
fun found[p: Proc]: set Obj { p in Expirer => below[no NoDecide => head.first else p.made.first].snap[Path] & objs else objs }
fun spared[p: Proc, j: set Job]: set Obj { (no NoHasPlan and (p in Sweeper or no NoExpiryPlans)) => own[j] else none }
fun named[p: Proc, h: Entry]: set Obj {         -- an expiry reads few versions, for what the head's ancestors name
  some NoKeptNames => h.snap[Path] else p in Sweeper => (h + versions[h]).snap[Path]
  else few[h].snap[Path] + (no NoAncestors => versions[h].snap[Path] - older[h.first] else none)
}
pred list[p: Proc] {
  p.pc = D1 or (p in Expirer and p.pc in Start + Asked)
  calm and to[p, D2, p.made, none, found[p], no NoPlansThenHead => plans else none, no NoPlansThenHead => none else head]
}
pred read[p: Proc] {
  p.pc = D2 and calm
  let h = ((p in Expirer and some NoDecide) => p.made else no NoPlansThenHead => head else p.seen),
      k = (no NoCandidatesFirst => p.cand else found[p]) - spared[p, no NoPlansThenHead => p.saw else plans] {
    no NoWhole + NoStrays => to[p, D4, p.made, none, k - named[p, h], none, none] else to[p, D3, p.made, none, k, none, h]
  }
}
pred reach[p: Proc] {                           -- only without Whole or Strays: the kept versions' entries are read later than the head
  p.pc = D3 and calm
  let n = kept[p.seen], r = { e: log | e.num in n } {
    ((no NoWhole and n - p.seen.num not in r.num) or (no NoStrays and r not in truth)) => to[p, D1, p.made, none, none, none, none]
    else to[p, D4, p.made, none, p.cand - (r + p.seen).snap[Path], none, none]
  }
}
pred delete[p: Proc] {
  p.pc = D4 and objs' in objs and some objs - objs' and objs - objs' in p.cand
  log' = log and truth' = truth and flight' = flight and ever' = ever and plans' = plans and rows' = rows and aside and still[Proc]
}
pred leave[p: Proc] {
  p.pc = D4 and no p.cand & objs and (p in Sweeper implies no below[head.first]) and aside and to[p, Done, p.made, none, none, none, none]
  world[(some NoDecide and p in Expirer) => flight + p.made else flight, objs, plans, rows]
}

-- Steps of who turns the master key: rule 11
pred turn[p: Master, e: Entry] {                -- an entry with all KEKs under the new version; then one that forbids the old one
  p.pc in Start + Asked and idleEntry[e] and e.keys = head.keys and e.first = head.first and inOver[e, none, none]
  e in Gone => (no NoGoneEntry and e.old = head.old and (no NoUnder implies no head.old)) else (head not in Gone and no e.old and some head.old)
  send[e] and to[p, Asked, e, none, none, none, none]
}
pred destroy[p: Master] {                       -- Done: the old version is destroyed, as the head, read after the entry, allows it
  p.pc in Start + Asked and calm and to[p, Done, p.made, none, none, none, none]
  some NoGoneHead => some p.made & Gone & log else (no NoUnder implies no head.old) and (no NoGoneEntry implies head in Gone)
}
pred writer[w: Writer] {
  (some o: Obj | begin[w, o] or bare[w, o] or resume[w, o] or again[w, o]) or begin[w, none] or resume[w, none] or beginLost[w]
  or peek[w] or hears[w] or (some e: Entry | commit[w, e] or quit[w, e]) or believe[w] or giveUp[w] or abort[w] or drop[w] or finish[w]
}
pred writerStep { some w: Writer | writer[w] }
pred deleterStep { some p: Expirer + Sweeper | list[p] or read[p] or reach[p] or delete[p] or leave[p] }
pred expirerStep { some p: Expirer | look[p] or unput[p] or some e: Entry | expire[p, e] }
pred sweeperStep { some p: Sweeper | peekSweep[p] or bury[p] or some e: Entry | sweep[p, e] }
pred masterStep { some p: Master | destroy[p] or some e: Entry | turn[p, e] }
pred storeStep { (some e: flight | land[e]) or landPlan or tidy }
pred step { writerStep or deleterStep or expirerStep or sweeperStep or masterStep or storeStep }
pred idle { calm and still[Proc] }
fact { always (step or always idle) }
pred steady[h, e: Entry] { e in Back or no (e.snap[Path] - h.snap[Path]) & older[h.num] }   -- only in `Back` comes what was away
pred begun {                                    -- at first: any log without jobs, an expiry perhaps in the midst of its deletions
  truth = Before and log in truth and some log and truth.num = { n: Num | lte[n, head.num] } and kept[head] in log.num
  all disj a, b: truth | a.num != b.num
  all e: truth | lte[e.first, e.num] and no over[e] and no e.by and no e.snap[Path].owner and e not in Gone
  all a, b: truth | b.num = a.num.next implies lte[a.first, b.first] and steady[a, b]
  no objs.owner and versions[head].snap[Path] in objs and ever = objs + truth.snap[Path]
  versions[head].snap[Path].kek in head.keys and head.old in head.keys and head.keys in rows
  no flight and no plans and no latePlans and no oldWrap and (no NoKekOwn implies no Writer.newKek & (Before.keys + rows + ever.kek))
  (no NoKekOwn implies all disj v, w: Writer | no v.newKek & w.newKek) and (some Kek implies all o: Obj | some o.kek)
  Proc.pc in Start and no made and no seen and no told and no cand and no saw
}

-- Claims
pred did[e, h: Entry] {                         -- entry e does to its parent h what its job wished
  no e.by => e.snap = h.snap
  else e.by in Put => e.snap = h.snap ++ (e.by.at -> e.snap[e.by.at]) and some e.snap[e.by.at]
  else e.by in Rename => some h.snap[X] and e.snap = Y -> h.snap[X]
  else some r: truth | r.num = e.by.version and e.snap = r.snap
}
pred c1 {
  all w: Writer | w.told = Yes implies w.job in truth.by
  all e: truth - Before, h: truth | h.num.next = e.num implies did[e, h]
  head.keys in rows and (Done in Master.pc implies no head.old)
}
pred c2 {
  head = top[truth] and kept[head] in (log & truth).num and { e: log | e.num in kept[head] } in truth
  versions[head].snap[Path] in objs and versions[head].snap[Path].kek in head.keys
}
pred c3 { (all w: Writer | w.told = No implies w.job not in truth.by) and (all j: Job | lone truth & by.j) }
pred holds { begun implies always (c1 and c2 and c3) }

-- Why the claims hold in runs of every length: `inv` is true at first, each step keeps it true, and it implies the claims.
fun born: set Job { (Writer - pc.Start).job }
pred fine[e: Entry] {                           -- an entry on its way that would become the head
  gte[e.first, head.first] and lte[e.first, e.num] and did[e, head] and e.by in e.committed and e.by in plans - over[head]
  e.committed in head.committed + e.by and head.committed & plans in e.committed and head.ended & plans in e.ended
  no (e.ended - head.ended) & truth.by and no e.ended & e.committed and e.ended in born - latePlans
  e.snap[Path] in objs and e.snap[Path] in versions[head].snap[Path] + own[e.by]
  (some e.by & Restore implies e in Back) and (some e.by & Put implies e.snap[e.by.at] in own[e.by])
  { x: versions[head] | gte[x.num, e.first] }.snap[Path].kek + e.snap[Path].kek in e.keys
  let new = e.keys - head.keys | new in rows and no new & truth.keys and new in (job.(e.by)).newKek
  e.old in e.keys and (head in Gone implies e in Gone) and (e in Gone implies no e.old)
}
pred inv {
  -- the log
  some truth and Before in truth and head = top[truth] and truth.num = { n: Num | lte[n, head.num] }
  (all disj a, b: truth | a.num != b.num) and (all disj a, b: log | a.num != b.num)
  kept[head] in (log & truth).num and (log - below[head.first]) in truth and no flight & (log + truth)
  (all e: truth | lte[e.first, e.num]) and (all a, b: truth | a.num.next = b.num implies lte[a.first, b.first] and steady[a, b])
  all e: truth - Before, h: truth | h.num.next = e.num implies did[e, h]
  all e: flight | lte[e.num, head.num] or (e.num = head.num.next and fine[e])
  -- jobs
  plans + latePlans + (truth + flight).by + over[head] + ever.owner.job in born
  truth.by & (plans + latePlans) in head.committed and head.committed in truth.by and no head.ended & truth.by
  all j: Job | lone truth & by.j
  all j: latePlans | j not in plans + (truth + flight).by + over[head] + ever.owner.job and no (job.j).told and (job.j).pc in Start + Done
  flight.by in (Writer <: made).Entry.job
  -- objects and KEKs
  objs in ever and truth.snap[Path] in ever and versions[head].snap[Path] in objs and truth.snap[Path].owner.job in truth.by
  versions[head].snap[Path].kek in head.keys and head.keys in rows and head.old in head.keys and (head in Gone implies no head.old)
  (all disj v, w: Writer | no v.newKek & w.newKek) and (all w: Writer | some w.newKek & truth.keys implies w.job in truth.by)
  all w: Writer | w.newKek in truth.keys or no (ever - owner.w).kek & w.newKek
  -- processes
  all w: Writer {
    w.pc in Start + Ready + Asked + Quit + Done and w.cand in own[w.job] & ever
    w.pc in Ready + Asked implies w.job in born and (w.job in plans - head.ended implies w.cand in objs) and no w.told
    w.job not in truth.by implies ever.kek & w.newKek in rows
    (w.told = Yes implies w.job in truth.by) and (w.pc = Quit implies w.told = No)
    w.told = No implies w.job not in truth.by and w.job in head.ended + (Job - plans)
    w.pc = Start implies no w.cand and no w.told and no w.made and no owner.w & ever
  }
  all p: Expirer + Sweeper {
    p.pc in Start + Asked + Rows + D1 + D2 + D4 + Done and no p.told
    p.pc = Rows implies p in Expirer and no (gone[p] - p.seen.keys) & head.keys
    (p.pc in Asked + Rows implies some p.made.num.prev & truth.num) and (p.pc in D2 + D4 implies p.cand in ever)
    p.pc = D2 implies no (p.cand - own[p.saw]).owner.job & (plans + latePlans)
    p.pc = D4 implies no p.cand.owner.job & (plans + latePlans) and no p.cand & versions[head].snap[Path]
  }
  all p: Master | p.pc in Start + Asked + Done and (p.pc = Done implies head in Gone)
}
pred alone {                                    -- C4: all have stopped but one sweep, to which every job is silent
  no flight + latePlans and Sweeper.pc in Start and always {
    (storeStep or sweeperStep or deleterStep or idle) and still[Writer + Expirer + Master] and (Sweeper.pc in Start + Asked and Sweeper.pc' = D1 implies no plans')
  }
}
pred swept { objs = versions[head].snap[Path] and no plans and no below[head.first] }

-- Commands
-- With all rules: C1 to C3 by induction, C4 for one sweep that runs alone from any state that `inv` allows
check first { begun implies inv } for 0 but 3 Num, 3 Entry, 2 Obj, 2 Job, 1 Put, 1 Rename, 1 Restore, 1 Kek, 2 Proc, 2 Writer, 1 Expirer, 1 Sweeper, 1 Master, 1..1 steps expect 0
check claims { inv implies c1 and c2 and c3 } for 0 but 3 Num, 3 Entry, 2 Obj, 2 Job, 1 Put, 1 Rename, 1 Restore, 1 Kek, 2 Proc, 2 Writer, 1 Expirer, 1 Sweeper, 1 Master, 1..1 steps expect 0
check store { inv and storeStep implies after inv } for 0 but 3 Num, 3 Entry, 2 Obj, 2 Job, 1 Put, 1 Rename, 1 Restore, 1 Kek, 2 Proc, 2 Writer, 1 Expirer, 1 Sweeper, 1 Master, 2..2 steps expect 0
check deleter { inv and deleterStep implies after inv } for 0 but 3 Num, 3 Entry, 2 Obj, 2 Job, 1 Put, 1 Rename, 1 Restore, 1 Kek, 2 Proc, 2 Writer, 1 Expirer, 1 Sweeper, 1 Master, 2..2 steps expect 0
check expirer { inv and expirerStep implies after inv } for 0 but 3 Num, 3 Entry, 2 Obj, 2 Job, 1 Put, 1 Rename, 1 Restore, 1 Kek, 2 Proc, 2 Writer, 1 Expirer, 1 Sweeper, 1 Master, 2..2 steps expect 0
check sweeper { inv and sweeperStep implies after inv } for 0 but 3 Num, 3 Entry, 2 Obj, 2 Job, 1 Put, 1 Rename, 1 Restore, 1 Kek, 2 Proc, 2 Writer, 1 Expirer, 1 Sweeper, 1 Master, 2..2 steps expect 0
check master { inv and masterStep implies after inv } for 0 but 3 Num, 3 Entry, 2 Obj, 2 Job, 1 Put, 1 Rename, 1 Restore, 1 Kek, 2 Proc, 2 Writer, 1 Expirer, 1 Sweeper, 1 Master, 2..2 steps expect 0
check writer { inv and writerStep implies after inv } for 0 but 3 Num, 3 Entry, 2 Obj, 2 Job, 1 Put, 1 Rename, 1 Restore, 1 Kek, 2 Proc, 2 Writer, 1 Expirer, 1 Sweeper, 1 Master, 2..2 steps expect 0
check c4 { inv and alone implies always (some Sweeper.pc & Done implies swept) } for 0 but 3 Num, 3 Entry, 2 Obj, 1 Job, 1 Put, 2 Proc, 1 Writer, exactly 1 Sweeper, 9..9 steps expect 0
check large_claims { inv implies c1 and c2 and c3 } for 0 but 4 Num, 4 Entry, 3 Obj, 3 Job, 2 Put, 1 Rename, 1 Restore, 2 Kek, 3 Proc, 3 Writer, 1 Expirer, 1 Sweeper, 1 Master, 1..1 steps expect 0
check large_store { inv and storeStep implies after inv } for 0 but 4 Num, 4 Entry, 3 Obj, 3 Job, 2 Put, 1 Rename, 1 Restore, 2 Kek, 3 Proc, 3 Writer, 1 Expirer, 1 Sweeper, 1 Master, 2..2 steps expect 0
check large_deleter { inv and deleterStep implies after inv } for 0 but 4 Num, 4 Entry, 3 Obj, 3 Job, 2 Put, 1 Rename, 1 Restore, 2 Kek, 3 Proc, 3 Writer, 1 Expirer, 1 Sweeper, 1 Master, 2..2 steps expect 0
check large_expirer { inv and expirerStep implies after inv } for 0 but 4 Num, 4 Entry, 3 Obj, 3 Job, 2 Put, 1 Rename, 1 Restore, 2 Kek, 3 Proc, 3 Writer, 1 Expirer, 1 Sweeper, 1 Master, 2..2 steps expect 0
check large_sweeper { inv and sweeperStep implies after inv } for 0 but 4 Num, 4 Entry, 3 Obj, 3 Job, 2 Put, 1 Rename, 1 Restore, 2 Kek, 3 Proc, 3 Writer, 1 Expirer, 1 Sweeper, 1 Master, 2..2 steps expect 0
check large_master { inv and masterStep implies after inv } for 0 but 4 Num, 4 Entry, 3 Obj, 3 Job, 2 Put, 1 Rename, 1 Restore, 2 Kek, 3 Proc, 3 Writer, 1 Expirer, 1 Sweeper, 1 Master, 2..2 steps expect 0
check large_writer { inv and writerStep implies after inv } for 0 but 4 Num, 4 Entry, 3 Obj, 3 Job, 2 Put, 1 Rename, 1 Restore, 2 Kek, 3 Proc, 3 Writer, 1 Expirer, 1 Sweeper, 1 Master, 2..2 steps expect 0
check large_c4 { inv and alone implies always (some Sweeper.pc & Done implies swept) } for 0 but 3 Num, 3 Entry, 3 Obj, 2 Job, 1 Put, 1 Rename, 2 Proc, 1 Writer, exactly 1 Sweeper, 9..9 steps expect 0
-- That each thing can happen
run commits_after_expiry { begun and eventually (some w: Writer | w.told = Yes and some head.snap[Path] and no below[head.first] and some truth - log) } for 0 but 3 Num, 3 Entry, 2 Obj, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Expirer, 2 Proc, 8..8 steps expect 1
run lands_in_the_past { begun and eventually (some e: log - truth | e.by in Put) } for 0 but 3 Num, 4 Entry, 1 Obj, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Expirer, 2 Proc, 9..9 steps expect 1
run resumes_and_commits { begun and eventually (some disj v, w: Writer | v.job = w.job and v.told + w.told = Yes and Yes in v.told and some v.cand and v.cand.owner = w) } for 0 but 2 Num, 2 Entry, 1 Obj, 1 Job, 1 Put, exactly 2 Writer, 2 Proc, 7..7 steps expect 1
run ends_and_says_no { begun and eventually (some w: Writer | w.told = No and w.job in head.ended) } for 0 but 2 Num, 2 Entry, 1 Obj, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Sweeper, 2 Proc, 7..7 steps expect 1
run renames_and_restores { begun and eventually (Rename + Restore in (told.Yes).job) } for 0 but 4 Num, 4 Entry, 1 Obj, 2 Job, exactly 1 Rename, exactly 1 Restore, exactly 2 Writer, 2 Proc, 9..9 steps expect 1
run rotates_a_kek { begun and eventually (some e: truth | some e.by and no e.keys & Before.keys & head.keys and some head.keys and some Before.keys and no e.snap[Path] & Before.snap[Path] and some Before.snap[Path] and rows = head.keys) } for 0 but 4 Num, 4 Entry, 2 Obj, 2 Kek, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Expirer, 2 Proc, 9..9 steps expect 1
run turns_the_master_key { begun and eventually (Done in Master.pc and some Before.old and some head.by and head in Gone) } for 0 but 4 Num, 4 Entry, 2 Obj, 2 Kek, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Master, 2 Proc, 9..9 steps expect 1
run sweeps_all { begun and eventually (some Sweeper.pc & Done and swept and some ever - objs and some head.snap[Path] and some head.ended) } for 0 but 2 Num, 2 Entry, 2 Obj, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Sweeper, 2 Proc, 11..11 steps expect 1
run takes_another_id { begun and eventually (some w: Writer | w.pc = Done and w.job in plans) } for 0 but 1 Num, 1 Entry, 1 Obj, 1 Job, 1 Put, exactly 1 Writer, 1 Proc, 4..4 steps expect 1
run wraps_again { begun and eventually (some w: Writer | w.told = Yes and some owner.w - w.cand & ever and #(ever & owner.w) > 1) } for 0 but 3 Num, 3 Entry, 3 Obj, 2 Kek, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Expirer, 2 Proc, 3 Int, 9..9 steps expect 1
-- Without one rule: a counterexample each. What some assume before `implies` only makes Alloy find it sooner
check no_names { holds } for 0 but exactly 1 NoNames, 3 Num, 3 Entry, 2 Obj, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Expirer, 2 Proc, 8..8 steps expect 1
check no_plan_first { holds } for 0 but exactly 1 NoPlanFirst, 2 Num, 2 Entry, 2 Obj, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Sweeper, 2 Proc, 9..9 steps expect 1
check no_over_check { holds } for 0 but exactly 1 NoOverCheck, 3 Num, 3 Entry, 2 Obj, 1 Job, 1 Put, exactly 1 Writer, 1 Proc, 6..6 steps expect 1
check no_keks { holds } for 0 but exactly 1 NoKeks, 3 Num, 3 Entry, 2 Obj, 2 Kek, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Expirer, 2 Proc, 6..6 steps expect 1
check no_kept { holds } for 0 but exactly 1 NoKept, 3 Num, 3 Entry, 2 Obj, 1 Job, 1 Restore, exactly 1 Writer, exactly 1 Expirer, 2 Proc, 7..7 steps expect 1
check no_mark { holds } for 0 but exactly 1 NoMark, 3 Num, 3 Entry, 2 Obj, 1 Job, 1 Put, exactly 1 Writer, 1 Proc, 6..6 steps expect 1
check no_unknown { holds } for 0 but exactly 1 NoUnknown, 2 Num, 2 Entry, 1 Obj, 1 Job, 1 Put, exactly 1 Writer, 1 Proc, 5..5 steps expect 1
check no_give_up { holds } for 0 but exactly 1 NoGiveUp, 2 Num, 2 Entry, 1 Obj, 1 Job, 1 Put, exactly 1 Writer, 1 Proc, 6..6 steps expect 1
check no_abort { holds } for 0 but exactly 1 NoAbort, 2 Num, 2 Entry, 1 Obj, 1 Job, 1 Put, exactly 2 Writer, 2 Proc, 6..6 steps expect 1
check no_candidates_first { holds } for 0 but exactly 1 NoCandidatesFirst, 2 Num, 2 Entry, 1 Obj, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Sweeper, 2 Proc, 8..8 steps expect 1
check no_plans_then_head { holds } for 0 but exactly 1 NoPlansThenHead, 2 Num, 2 Entry, 1 Obj, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Sweeper, 2 Proc, 10..10 steps expect 1
check no_has_plan { holds } for 0 but exactly 1 NoHasPlan, 2 Num, 2 Entry, 1 Obj, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Sweeper, 2 Proc, 8..8 steps expect 1
check no_kept_names { holds } for 0 but exactly 1 NoKeptNames, 2 Num, 2 Entry, 1 Obj, exactly 1 Sweeper, 1 Proc, 5..5 steps expect 1
check no_back { holds } for 0 but exactly 1 NoBack, 4 Num, 4 Entry, 1 Obj, exactly 1 Expirer, 1 Proc, 5..5 steps expect 1
check no_trim { holds } for 0 but exactly 1 NoTrim, 2 Num, 2 Entry, 1 Obj, exactly 1 Expirer, 1 Proc, 3..3 steps expect 1
check no_decide { holds } for 0 but exactly 1 NoDecide, 3 Num, 3 Entry, 1 Obj, exactly 1 Expirer, 1 Proc, 5..5 steps expect 1
check no_fence { holds } for 0 but exactly 1 NoFence, 2 Num, 2 Entry, 1 Obj, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Sweeper, 2 Proc, 8..8 steps expect 1
check no_kek_kept { holds } for 0 but exactly 1 NoKekKept, 3 Num, 3 Entry, 1 Obj, 2 Kek, exactly 1 Expirer, 1 Proc, 4..4 steps expect 1
check no_kek_own { holds } for 0 but exactly 1 NoKekOwn, 3 Num, 3 Entry, 1 Obj, 1 Kek, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Expirer, 2 Proc, 9..9 steps expect 1
check no_ext_put { holds } for 0 but exactly 1 NoExtPut, 2 Num, 2 Entry, 1 Obj, 1 Kek, 1 Job, 1 Put, exactly 1 Writer, 1 Proc, 4..4 steps expect 1
check no_ext_order { holds } for 0 but exactly 1 NoExtOrder, 2 Num, 2 Entry, 1 Obj, 1 Kek, exactly 1 Expirer, 1 Proc, 3..3 steps expect 1
check no_gone_check { holds } for 0 but exactly 1 NoGoneCheck, 3 Num, 3 Entry, 1 Obj, 2 Kek, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Master, 2 Proc, 7..7 steps expect 1
check no_gone_entry { holds } for 0 but exactly 1 NoGoneEntry, 2 Num, 2 Entry, 1 Obj, 2 Kek, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Master, 2 Proc, 6..6 steps expect 1
check no_under { holds } for 0 but exactly 1 NoUnder, 2 Num, 2 Entry, 1 Obj, 2 Kek, exactly 1 Master, 1 Proc, 4..4 steps expect 1
check large_no_anew { holds } for 0 but exactly 1 NoAnew, 3 Num, 4 Entry, 2 Obj, 2 Job, 1 Put, 1 Rename, exactly 2 Writer, 2 Proc, 8..8 steps expect 1
check large_no_look { holds } for 0 but exactly 1 NoLook, 3 Num, 4 Entry, 1 Obj, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Expirer, 2 Proc, 10..10 steps expect 1
check large_no_gone_head { holds } for 0 but exactly 1 NoGoneHead, 3 Num, 4 Entry, 1 Obj, 1 Kek, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Expirer, exactly 1 Master, 3 Proc, 10..10 steps expect 1
check large_no_plan_once { holds } for 0 but exactly 1 NoPlanOnce, 4 Num, 4 Entry, 0 Obj, 1 Kek, 1 Job, 1 Restore, exactly 1 Writer, exactly 1 Expirer, exactly 1 Sweeper, 3 Proc, 10..10 steps expect 1
check large_no_plan_check { holds } for 0 but exactly 1 NoPlanCheck, 4 Num, 4 Entry, 0 Obj, 1 Kek, 1 Job, 1 Restore, exactly 1 Writer, exactly 1 Expirer, exactly 1 Sweeper, 3 Proc, 9..9 steps expect 1
check large_no_drop { holds } for 0 but exactly 1 NoDrop, 4 Num, 4 Entry, 0 Obj, 1 Kek, 1 Job, 1 Restore, exactly 1 Writer, exactly 1 Expirer, 2 Proc, 8..8 steps expect 1
check large_no_whole { holds } for 0 but exactly 1 NoWhole, 4 Num, 4 Entry, 2 Obj, 1 Job, 1 Restore, exactly 1 Writer, exactly 1 Sweeper, 2 Proc, 10..10 steps expect 1
check large_no_ext_head { holds } for 0 but exactly 1 NoExtHead, 3 Num, 4 Entry, 0 Obj, 1 Kek, exactly 2 Expirer, 2 Proc, 10..10 steps expect 1
check large_no_plan_after { holds } for 0 but exactly 1 NoPlanAfter, 4 Num, 4 Entry, 0 Obj, 1 Kek, 1 Job, 1 Restore, exactly 1 Writer, exactly 1 Expirer, exactly 1 Sweeper, 3 Proc, 11..11 steps expect 1
check large_no_expiry_plans { (no ended and one Before and always (no latePlans and no Proc.told)) implies holds } for 0 but exactly 1 NoExpiryPlans, exactly 4 Num, exactly 5 Entry, exactly 1 Obj, exactly 1 Job, exactly 1 Put, exactly 1 Writer, exactly 1 Expirer, exactly 2 Proc, 14..14 steps expect 1
check large_no_past { holds } for 0 but exactly 1 NoPast, 4 Num, 5 Entry, 1 Obj, 1 Job, 1 Put, exactly 1 Writer, exactly 1 Expirer, exactly 1 Sweeper, 3 Proc, 15..15 steps expect 1
check large_no_relook { holds } for 0 but exactly 1 NoRelook, exactly 4 Num, exactly 4 Entry, 0 Obj, exactly 1 Kek, exactly 1 Job, exactly 1 Restore, exactly 2 Writer, exactly 1 Expirer, exactly 1 Sweeper, exactly 4 Proc, 13..13 steps expect 1
check large_no_strays { (no ended and one Before and (writerStep; writerStep; expirerStep; storeStep; writerStep; storeStep; sweeperStep; deleterStep; deleterStep; writerStep; writerStep; storeStep; storeStep; storeStep; deleterStep; deleterStep)) implies holds } for 0 but exactly 1 NoStrays, exactly 4 Num, exactly 5 Entry, exactly 2 Obj, exactly 2 Job, exactly 1 Put, exactly 1 Restore, exactly 2 Writer, exactly 1 Expirer, exactly 1 Sweeper, exactly 4 Proc, 17..17 steps expect 1
check large_no_ancestors { (no ended and one Before and (writerStep; writerStep; expirerStep; storeStep; expirerStep; storeStep; storeStep; writerStep; storeStep; writerStep; writerStep; writerStep; writerStep; storeStep; storeStep; deleterStep; deleterStep; deleterStep)) implies holds } for 0 but exactly 1 NoAncestors, exactly 5 Num, exactly 6 Entry, exactly 1 Obj, exactly 2 Job, exactly 1 Put, exactly 1 Restore, exactly 2 Writer, exactly 1 Expirer, exactly 3 Proc, 19..19 steps expect 1
